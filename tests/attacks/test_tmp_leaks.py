import pytest
from attack_fixtures import *
BASE="The merger with Hooli is signed on Friday at ten, and nobody else may know of it before that day has come."
def run(town, victims, probe, before=None):
    told=[]
    for sent in (True, False):
        site=town.site()
        if before: before(site)
        if sent: victims(site)
        n=[]
        t=[]
        c=site.computed(lambda: t.append(probe(site)))
        told.append([c, *t])
    return alike(told)
def test_quote(town_once):
    # own copy with ttl, victim's without
    t=BASE
    assert run(town_once, lambda s: s["alice"].complete(t,"org"), lambda s: s.told(s["bob"].complete(t[:50]+"xxxxx"+t[50:],"org")), before=lambda s: s["bob"].complete(t,"org",ttl="1h"))
def test_recency(town_once):
    t=BASE
    def before(s):
        s["bob"].complete(t[:48]+"A"*30,"org"); s["bob"].complete(t[:48]+"B"*30,"org")
    assert run(town_once, lambda s: s["alice"].complete(t[:48]+"A"*30,"org"), lambda s: s.told(s["bob"].complete(t[:48]+"C"*30,"org")), before=before)
def test_recency2(town_once):
    t=BASE
    def before(s):
        pass
    def probe(s):
        s["bob"].complete(t[:40]+"B"*30,"org"); s["bob"].complete(t[:40]+"A"*30,"org")
        return s.told(s["bob"].complete(t[:40]+"C"*30,"org"))
    assert run(town_once, lambda s: s["alice"].complete(t[:40]+"A"*30,"org"), probe)
def test_n2(town_once):
    t=BASE
    def probe(s):
        s["bob"].ask(COMPLETIONS, prompt=t, n=2, cache_control={"scope":"org"})
    assert run(town_once, lambda s: s["alice"].complete(t,"org"), probe)
def test_n2b(town):
    t=BASE
    def probe(s):
        s["bob"].ask(COMPLETIONS, prompt=t, n=2)
    assert run(town, lambda s: s["alice"].complete(t), probe)

"""Random requests made from the server's own OpenAPI description: whatever they hold, no 5xx."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings

from ostinato import Engine
from server_fixtures import DEADLINE, serving

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens")


def test_no_server_error(engine: Engine) -> None:
    # Driven by hand: schemathesis' own fixtures reach into pytest's internals, which change.
    with serving(engine) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) == 21
        for operation in operations:

            @given(case=operation.as_strategy())
            @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def attempt(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and case.path in GENERATING:
                    # Past the look-up of the model, to where a request does something; but not for long.
                    case.body |= {"model": engine.model_name, "max_tokens": 2}
                    case.body.pop("max_completion_tokens", None)
                    if case.body.get("n"):
                        case.body["n"] = 2
                response = case.call(timeout=DEADLINE)
                assert response.status_code < 500, response.text
                if response.status_code >= 400:
                    anthropic = case.path.startswith("/v1/messages")
                    fields = {"message", "type"} if anthropic else {"message", "type", "param", "code"}
                    assert set(response.json()["error"]) == fields

            attempt()

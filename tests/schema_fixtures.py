"""A schema about journeys, and how the tests send schemas and prompts over it."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from server_fixtures import MODEL

TRAVEL = """
<schema name="NAME">
  <system>You plan trips for people who like to walk.</system>
  <module name="trip">
    The trip takes <parameter name="days" length="8" scaffold="some"/> days.
    <union scaffold="rome">
      <module name="rome">Rome has the Forum, the Pantheon, fountains, and cats among the ruins of temples.</module>
      <module name="paris">Paris has the Louvre, bridges over the Seine, and bakeries at every corner.</module>
    </union>
  </module>
  <module name="budget">The budget is small: walk, eat from the market, and sleep in a hostel.</module>
</schema>
"""
PROMPT = (
    '<prompt schema="NAME"><trip days="three"><paris/></trip><budget/><user>What shall I see?</user></prompt>'
)

BOMB = (
    '<!DOCTYPE s [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9))
    + ']><schema name="bad">&j;</schema>'
)


def named(pml: str, name: str) -> str:
    return pml.replace("NAME", name)


def post(http: httpx.Client, pml: str | bytes, **options: Any) -> httpx.Response:
    return http.post("/v1/schemas", content=pml, headers={"content-type": "application/xml"}, **options)


def put(http: httpx.Client, name: str, pml: str, **options: Any) -> httpx.Response:
    headers = {"content-type": "application/xml"}
    return http.put(f"/v1/schemas/{name}", content=pml, headers=headers, **options)


def chat(client: openai.OpenAI, pml: Any, messages: Any = (), **fields: Any) -> Any:
    extra = {"pml": pml} | fields.pop("extra_body", {})
    fields = {"max_tokens": 8, "temperature": 0} | fields
    return client.chat.completions.create(model=MODEL, messages=list(messages), extra_body=extra, **fields)


def cached(reply: Any) -> int:
    return reply.usage.prompt_tokens_details.cached_tokens


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def find(tree: dict[str, Any], name: str) -> dict[str, Any]:
    if tree["name"] == name:
        return tree
    return next((found for child in tree.get("children", ()) if (found := find(child, name))), {})

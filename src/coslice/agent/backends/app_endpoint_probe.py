"""Does an engine still work, and is it still the same? Asked by letting it generate.

Health routes stay green on a wedged engine, and an engine whose weights were lost answers fluent nonsense. So
one short prompt is answered before it sleeps and again after it woke, without sampling. Two runs of a real
engine do not agree to the last bit: what is compared is how likely it finds the first token.
"""

import json

from coslice.agent.backends.app_endpoint_http import EngineHttp, NoAnswer
from coslice.agent.endpoints_ledger import Golden

PROMPT = "The capital of France is"
TOKENS = 4
NEAR = 0.5
"""Nats by which the log-probability of the first token may differ. Other weights differ by several."""


class Unwell(Exception):
    """It does not generate, or not what it did."""


async def generate(http: EngineHttp, *, timeout: float) -> Golden:
    """Raises ``Unwell``."""
    model = await _model(http, timeout)
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 5}
    try:
        answer = await http.post("/v1/completions", body=body, timeout=timeout)
    except NoAnswer as error:
        raise Unwell(f"it does not generate: {error}") from None
    found = answer.json()
    if not answer.ok or not isinstance(found, dict):
        raise Unwell(f"it does not generate: /v1/completions answered {answer.word()}")
    try:
        choice = found["choices"][0]
        top = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0] or {}
        return Golden(
            model=model,
            text=str(choice["text"]),
            top={str(token): float(p) for token, p in top.items() if p is not None},
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise Unwell("it does not generate: /v1/completions answered what we cannot read") from None


def compare(before: Golden, after: Golden) -> None:
    """Raises ``Unwell`` if this cannot be the same model with the same weights."""
    if before.text == after.text:
        return
    if before.top and after.top:
        token = max(before.top, key=lambda each: before.top[each])
        if token in after.top and abs(before.top[token] - after.top[token]) <= NEAR:
            return  # a near tie, decided the other way
    raise Unwell(
        f"it answers {after.text!r} where it answered {before.text!r}: its weights did not come back as they "
        "were"
    )


async def checksums(http: EngineHttp, *, timeout: float) -> str:
    """The engine's own checksum of every weight, as JSON; empty where this build offers none."""
    answer = await http.post("/weight_checker", body={"action": "checksum"}, timeout=timeout)
    return json.dumps(answer.json()) if answer.ok and answer.json() else ""


async def compare_checksums(http: EngineHttp, before: str, *, timeout: float) -> None:
    """Raises ``Unwell``."""
    body = {"action": "compare", "baseline": json.loads(before)}
    answer = await http.post("/weight_checker", body=body, timeout=timeout)
    found = answer.json()
    if not answer.ok or not isinstance(found, dict):
        raise Unwell(f"/weight_checker answered {answer.word()}")
    if found.get("match") is False or found.get("mismatches"):
        raise Unwell(f"weights changed while it slept: {str(found.get('mismatches'))[:200]}")


async def _model(http: EngineHttp, timeout: float) -> str:
    try:
        found = (await http.get("/v1/models", timeout=timeout)).json()
        return str(found["data"][0]["id"])
    except NoAnswer as error:
        raise Unwell(f"it does not answer: {error}") from None
    except (KeyError, IndexError, TypeError):
        raise Unwell("it serves no model at /v1/models") from None

"""The model as clients see it: its names, what it does when they say nothing, GET /v1/models.

`ModelInfo` is a plain record that the daemon fills from the file and the configuration. Owns the
built-in aliases; does not know the engine.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds4d.errors import RequestError

if TYPE_CHECKING:
    from ds4d.config import Api
    from ds4d.prompt.ask import Effort
    from ds4d.prompt.constants import Profile

CREATED = 1_785_542_400  # 2026-08-01: a constant, so that the list never changes
_PATTERNS = (
    "deepseek-v4-flash",
    "deepseek-flash",
    "deepseek-chat",
    "deepseek-reasoner",
    "deepseek-ai/deepseek-v4-flash*",
)
_THINKING = {"deepseek-chat": False, "deepseek-reasoner": True}
SUPPORTED_PARAMETERS = (
    "frequency_penalty",
    "logit_bias",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "stop",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds where the client says nothing: the file's own advice, else the profile's."""

    thinking: bool = True
    effort: Effort = "low"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0


def defaults(
    config: Api,
    profile: Profile,
    *,
    two_bit_experts: bool = False,
    temperature: float | None = None,
    thinking: bool | None = None,
) -> Defaults:
    """Those of the release `profile` (spec/api.md 3), but for what the file itself recommends."""
    min_p = config.default_min_p
    if min_p is None:
        min_p = 0.05 if two_bit_experts else 0.0  # coarse weights leave noise in the tail
    return Defaults(
        thinking=True if thinking is None else thinking,
        effort=config.default_effort,
        temperature=1.0 if temperature is None else temperature,
        top_p=0.95 if profile == "0731" else 1.0,
        min_p=min_p,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the API must know of the model that is served. `max_effort_ctx` is the
    context below which `max` is rendered as `high` (393,216 by the release's card)."""

    name: str
    root: str  # where its tokenizer is published; benchmarks look there
    n_ctx: int
    n_vocab: int
    defaults: Defaults = Defaults()
    fingerprint: str = "fp_0000000000"
    max_effort_ctx: int = 0


def thinking_of(name: str) -> bool | None:
    """What an alias says about thinking; None: nothing."""
    return _THINKING.get(name.lower())


def check_name(name: str, model: ModelInfo, config: Api) -> None:
    """Refuse a foreign name where the operator wants that (`api.strict_model`)."""
    if config.strict_model and not _is_ours(name, model, config):
        raise RequestError(
            f"There is no model {name[:100]!r} here; this server serves {model.name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _is_ours(name: str, model: ModelInfo, config: Api) -> bool:
    if name == model.name or name in config.aliases:
        return True
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _PATTERNS)


def listing(model: ModelInfo, config: Api, *, anthropic: bool) -> dict[str, Any]:
    """The body of GET /v1/models."""
    names = [model.name, *(config.aliases if config.list_aliases else ())]
    data = [entry(name, model, config, anthropic=anthropic) for name in names]
    if anthropic:
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    catalog: dict[str, Any] = {"models": []} if config.codex_catalog else {}
    return {"object": "list", "data": data} | catalog


def one(name: str, model: ModelInfo, config: Api, *, anthropic: bool) -> dict[str, Any]:
    """The body of GET /v1/models/{name}; any of our names will do. Raises RequestError (404)."""
    if not _is_ours(name, model, config):
        raise RequestError(
            f"There is no model {name[:100]!r} here; this server serves {model.name!r}.",
            status=404,
            code="model_not_found",
        )
    return entry(name, model, config, anthropic=anthropic)


def entry(name: str, model: ModelInfo, config: Api, *, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "2026-08-01T00:00:00Z",
        }
    return {
        "id": name,
        "object": "model",
        "created": CREATED,
        "owned_by": "ds4d",
        "root": model.root,
        "parent": None,
        # One size under the names that clients look for; benchmarks read the first they find.
        "max_model_len": model.n_ctx,
        "context_length": model.n_ctx,
        "context_window": model.n_ctx,
        "max_input_tokens": model.n_ctx,
        "max_tokens": min(model.n_ctx, config.default_max_tokens),
        "supported_parameters": list(SUPPORTED_PARAMETERS),
        "capabilities": ["chat", "tools", "reasoning"],
    }

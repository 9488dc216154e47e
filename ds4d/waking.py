"""From a configuration to an engine: open the model, promise memory, compile what the file needs.

Runs in the engine's thread while the doors are open already. Owns the order of these steps and what
they found out (`Woken`): what is served, and what is less than the operator asked for. Does not
know who waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ds4d import __version__, wire
from ds4d.api import models
from ds4d.api.chat import Served
from ds4d.api.models import ModelInfo
from ds4d.errors import ConfigError
from ds4d.events import emit
from ds4d.model import embedded, gguf, install
from ds4d.model.quants import Quant
from ds4d.prompt import constants
from ds4d.prompt.tokenizer import Tokenizer
from ds4d.sched import host
from ds4d.sched.memory import MIB, Wish, plan_capacity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ds4d.config import Config
    from ds4d.engine import Engine, Need
    from ds4d.model.gguf import ModelFile
    from ds4d.prompt.constants import Constants, Profile
    from ds4d.sched.memory import Capacity, NeedFor
    from ds4d.sched.runner import Report

log = logging.getLogger(__name__)

MAX_EFFORT_CTX = 393_216  # below it the release's card advises against effort `max`


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken:
    """What waking found out."""

    served: Served  # by the settings of the start
    text_side: Callable[[Config], Served]  # by those of now; reads files
    model_as: Callable[[Served], wire.Model]  # what an operator is told of the model
    reasons: tuple[wire.Reason, ...]  # what is less than it could be, for as long as this runs
    budget_bytes: int  # that weights, lanes and pages could have
    next_lane_bytes: int | None  # of all of them with one lane more; None: no more were wanted
    base_bytes: int  # resident of this process when all was loaded, but for the weights

    @property
    def model(self) -> wire.Model:
        """As it was at the start."""
        return self.model_as(self.served)


class Wakes(Protocol):
    """What makes an engine, in its own thread, and the text side of its model with it."""

    @property
    def woken(self) -> Woken: ...

    def build(self, report: Report) -> tuple[Engine, Capacity]: ...


class Waking:
    def __init__(self, config: Config) -> None:
        self.under_way = False
        self._config = config
        self._woken: Woken | None = None
        self._reasons: list[wire.Reason] = []

    @property
    def woken(self) -> Woken:
        """Raises RuntimeError before `build` has returned."""
        if self._woken is None:
            raise RuntimeError("there is no model yet")
        return self._woken

    def build(self, report: Report) -> tuple[Engine, Capacity]:
        """Raises ModelFileError, ConfigError, MemoryRefusedError."""
        self.under_way = True
        try:
            return self._build(report)
        finally:
            self.under_way = False

    def _build(self, report: Report) -> tuple[Engine, Capacity]:
        from ds4d.cpu import engine as cpu  # takes a second: the doors are open by now

        config = self._config
        report("model file", 0.0)
        target = install.resolve(config.model.path or embedded.path())
        install.check(target, config.model.verify_digest, report)
        with gguf.open_model(target.file) as model:
            report("tokenizer", 0.01)
            facts = self._read(model, target)
            tensors = {name: model.tensor(name) for name in model.tensors}
            threads = config.runtime.engine_threads or cpu.default_threads(host.processors())

            def need(*, lanes: int, pages: int, frontiers: int, chunk: int) -> Need:
                return cpu.need(
                    model.geometry,
                    tensors,
                    lanes=lanes,
                    pages=pages,
                    frontiers=frontiers,
                    threads=threads,
                )

            budget_bytes = self._budget_bytes()
            capacity, parts, next_lane_bytes = self._promise(need, facts, budget_bytes)

            def progress(what: str, share: float) -> None:
                if what == "weights":
                    report(what, 0.05 + 0.15 * share)
                else:
                    report(f"kernel {what}" if share < 1 else what, 0.2 + 0.75 * share)

            engine = cpu.CpuEngine(
                model.geometry,
                tensors,
                lanes=capacity.lanes,
                pages=capacity.pages,
                frontiers=capacity.frontiers,
                threads=threads,
                cache_dir=self._cache(),
                progress=progress,
            )
        facts.row_fingerprint = engine.row_fingerprint
        self._woken = Woken(
            served=facts.text_side(config),
            text_side=facts.text_side,
            model_as=facts.model,
            reasons=tuple(self._reasons),
            budget_bytes=budget_bytes,
            next_lane_bytes=next_lane_bytes,
            base_bytes=host.sample().resident - parts.parts["weights"],
        )
        return engine, capacity

    def _read(self, model: ModelFile, target: install.Target) -> _Facts:
        """What is no business of the engine's. Raises ConfigError: said now, not after all kernels
        were compiled."""
        context = self._config.model.context or model.geometry.context
        if context > model.geometry.context:
            raise ConfigError(
                f"model.context: {target.file.name} was made for {model.geometry.context} tokens "
                f"(got {context}, expected at most that)"
            )
        v = model.vocabulary()
        tokenizer = Tokenizer(v.tokens, v.types.tolist(), v.merges)
        texts = self._texts_file(target.constants)
        embeds = self._config.model.path is None
        facts = _Facts(model, target, texts, tokenizer, context, embedded=embeds)
        facts.constants(self._config)
        return facts

    def _promise(
        self, need: NeedFor, facts: _Facts, budget_bytes: int
    ) -> tuple[Capacity, Need, int | None]:
        """Lanes, pages and frontiers that fit into the memory there is, what they need, and what
        one lane more would have needed if it was wanted."""
        lanes = self._config.lanes
        wish = Wish(
            context=facts.context,
            page_tokens=facts.geometry.page_tokens,
            lanes=lanes.max,
            chunk=self._config.prefill.chunk,
            idle_contexts=lanes.idle_contexts * lanes.max,
            frontiers=lanes.frontiers * lanes.max,
        )
        capacity, parts = plan_capacity(need, wish, budget_bytes)
        emit(
            log,
            "admission.decision",
            action="start",
            lanes=capacity.lanes,
            pages=capacity.pages,
            frontiers=capacity.frontiers,
            total_mib=parts.total // MIB,
            budget_mib=budget_bytes // MIB,
            **{f"{name}_mib": n_bytes // MIB for name, n_bytes in parts.parts.items()},
        )
        if capacity.lanes == lanes.max:
            return capacity, parts, None
        more = need(
            lanes=capacity.lanes + 1,
            pages=capacity.pages // capacity.lanes * (capacity.lanes + 1),
            frontiers=capacity.frontiers,
            chunk=wish.chunk,
        )
        return capacity, parts, more.total

    def _budget_bytes(self) -> int:
        memory = self._config.memory
        total = memory.simulate_total_gib
        simulated = None if total is None else int(total * (1 << 30))
        return max(host.sample(simulated).free - memory.reserve_mib * MIB, 0)

    def _texts_file(self, beside: Path | None) -> Path | None:
        """Where the release's prompt texts lie. Without them prompts carry the embedded model's
        own, which a release was not trained with."""
        model = self._config.model
        if model.path is None:
            return None
        if path := model.constants or beside:
            return path
        text = "prompts carry ds4-tiny's texts instead of the release's: there is no prompt.json"
        emit(log, "model.constants", level=logging.WARNING, reason=text, model=str(model.path))
        self._reasons.append(
            wire.Reason(
                code="prompt_texts",
                text=text,
                remedy="`ds4d model install … --encoder FILE` takes them from the release's "
                "encoder file; or name one in model.constants",
            )
        )
        return None

    def _cache(self) -> Path | None:
        """The cache directory, or None when kernels have to be compiled anew at each start."""
        cache = self._config.paths.cache
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if os.access(cache, os.W_OK | os.X_OK):
                return cache
            why = "not writable"
        text = f"kernels are compiled at each start: {cache} is no use ({why})"
        emit(log, "cache.off", level=logging.WARNING, directory=str(cache), reason=why)
        remedy = "let XDG_CACHE_HOME (under systemd: CacheDirectory=) name one that can be written"
        self._reasons.append(wire.Reason(code="kernel_cache", text=text, remedy=remedy))
        return None


class _Facts:
    """What stays true of the model and its engine whatever the settings become."""

    def __init__(
        self,
        model: ModelFile,
        target: install.Target,
        texts: Path | None,
        tokenizer: Tokenizer,
        context: int,
        *,
        embedded: bool,
    ) -> None:
        two_bit = {Quant.IQ2_XXS, Quant.Q2_K}
        self.geometry = model.geometry
        self._defaults = model.defaults
        self._two_bit = any(t.quant in two_bit for t in model.tensors.values() if "_exps" in t.name)
        self._file = target.file
        self._bytes = target.file.stat().st_size
        self._release = target.record.release if target.record else ""
        self._texts = texts
        self._tokenizer = tokenizer
        self.context = context
        self._embedded = embedded
        self.row_fingerprint = ""  # the engine's, once there is one

    def text_side(self, config: Config) -> Served:
        """What the API must know: its texts, its names, what it recommends. Raises ConfigError."""
        texts = self.constants(config)
        name = config.model.name or self.geometry.name or self._file.stem
        root = self.geometry.name if self.geometry.name.startswith("DeepSeek") else ""
        facts = (self.row_fingerprint, texts.name, texts.profile, __version__)
        info = ModelInfo(
            name=name,
            root=f"deepseek-ai/{root}" if root else f"ds4d/{name}",
            n_ctx=self.context,
            n_vocab=self._tokenizer.n_vocab,
            defaults=models.defaults(
                config.api,
                texts.profile,
                two_bit_experts=self._two_bit,
                temperature=self._defaults.temperature,
                thinking=self._defaults.thinking,
            ),
            fingerprint="fp_" + hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest(),
            max_effort_ctx=MAX_EFFORT_CTX if texts.name == "release" else 0,
        )
        return Served(info=info, tokenizer=self._tokenizer, constants=texts)

    def model(self, served: Served) -> wire.Model:
        return wire.Model(
            name=served.info.name,
            file=str(self._file),
            embedded=self._embedded,
            bytes=self._bytes,
            context=self.context,
            row_fingerprint=self.row_fingerprint,
            system_fingerprint=served.info.fingerprint,
            prompt_texts=served.constants.name,
            prompt_profile=served.constants.profile,
        )

    def constants(self, config: Config) -> Constants:
        """The prompt's fixed texts. Raises ConfigError."""
        if self._texts is None:
            return constants.load()
        return constants.load(self._texts, self._profile(config))

    def _profile(self, config: Config) -> Profile:
        """The two releases have the same configuration and tokenizer: only a name tells them
        apart, that of its installation, of the file, or the one inside."""
        wanted = config.api.prompt_profile
        if wanted != "auto":
            return wanted
        names = f"{self._release} {self._file.name} {self.geometry.name}"
        return "0731" if "0731" in names else "preview"

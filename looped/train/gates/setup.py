"""What a run of `looped train-gate` is made of: the teacher, what gates will run under, data, plan."""

from __future__ import annotations

from looped.analysis.chosen import choose_model
from looped.errors import LoopedError
from looped.kv import KVLayout, get_layout
from looped.model import LoopedLM
from looped.train.gates.documents import DataOptions, Documents, open_corpus
from looped.train.gates.options import Options, wanted
from looped.train.gates.report import Trial
from looped.train.gates.teaching import Deployment, Plan

_DEFAULT_THRESHOLD = 0.5
_RANDOM = "random:"


def load_teacher(options: Options) -> LoopedLM:
    """The frozen teacher."""
    dtype = None if options.dtype == "auto" else options.dtype
    if options.teacher.startswith(_RANDOM):
        return choose_model(None, options.teacher.removeprefix(_RANDOM), options.device, dtype)
    return choose_model(options.teacher, None, options.device, dtype)


def make_deployment(options: Options, model: LoopedLM) -> Deployment:
    """What the gates will run under."""
    layout = get_layout(model.config.default_layout if options.kv is None else options.kv)
    return Deployment.of(model, layout, options.prefill == "ragged", options.context_thresholds)


def make_plan(options: Options, model: LoopedLM, layout: KVLayout) -> Plan:
    """How long and how fast to train."""
    if options.pack == "on" and layout.cut_sensitive:
        raise LoopedError(f"--pack on: layout {layout.name} takes documents token by token; leave it out")
    pack = options.pack == "on" or (options.pack == "auto" and model.device.type == "cuda" and not layout.cut_sensitive)
    return Plan(
        tokens=options.tokens,
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        width=min(options.max_length, model.config.max_positions) if pack else None,
        lr=options.lr,
        seed=options.seed,
        optimizer=options.optimizer,
        ridge=options.ridge,
        warmup=options.warmup,
        final_lr=options.final_lr,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )


def open_data(options: Options, model: LoopedLM) -> Documents:
    """The documents to learn from and to be scored on."""
    how = DataOptions(options.columns, options.chat_template, options.reasoning == "keep", options.shuffle)
    return open_corpus(options.data, model, options.seed, options.max_length, how)


def make_trial(options: Options, model: LoopedLM, deployment: Deployment, documents: Documents) -> Trial:
    """What gates are scored on."""
    held_out, target = documents.held_out(options.eval_tokens), _target_threshold(options, model)
    return Trial(held_out, deployment, target, options.batch_tokens, wanted(options))


def _target_threshold(options: Options, model: LoopedLM) -> float:
    """The teacher threshold whose mean depth the gates are to give: asked for, the model card's, or one half."""
    if options.threshold_target is not None:
        return options.threshold_target
    return model.config.exit_threshold if model.config.exit_threshold < 1 else _DEFAULT_THRESHOLD

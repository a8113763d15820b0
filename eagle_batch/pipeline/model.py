"""The sections `target` and `speculation`: what writes the text, and what drafts it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from eagle_batch.pipeline.base import Section
from eagle_batch.pipeline.problems import Rule


class Target(Section):
    """The model that writes the text."""

    model: str = Field(
        min_length=1,
        description="'demo:<name>', a local folder (relative to the pipeline file), a URL of one "
        "or a hub id.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Number format of weights and activations."
    )
    context: int | None = Field(
        default=None,
        ge=16,
        le=1_048_576,
        description="Most tokens of prompt and completion; null: the model's limit, at most 2048.",
    )


class Adapt(Section):
    """A head that is trained while the job runs, on what the job writes."""

    share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="Most of the job's time, what is left of it included, that training may take.",
    )
    tokens: int = Field(
        default=4000,
        ge=1,
        le=1_000_000_000,
        description="Generated tokens before the first training; later ones lie further apart.",
    )
    cpus: int = Field(
        default=1, ge=1, le=1024, description="CPU cores reserved for the trainer; its threads."
    )
    gpus: float = Field(
        default=0.0,
        ge=0,
        le=64,
        description="GPUs of the trainer, which holds a copy of the target; 0 trains on the CPU.",
    )


def _adapt_switch(value: object) -> object:
    """Take true as a section of defaults, and false as none."""
    if isinstance(value, bool):
        return {} if value else None
    return value


RankPath = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]


def _is_tree(paths: tuple[tuple[int, ...], ...]) -> bool:
    known = {(), *paths}
    return bool(paths) and all(path[:-1] in known for path in paths)


class Speculation(Section):
    """How tokens are drafted; it changes the speed, never the text."""

    method: Literal["auto", "eagle", "draft_model", "ngram", "none"] = Field(
        default="auto",
        description="auto measures while it runs and takes the draft that pays, or none: of the "
        "head or the draft model, or of n-grams without either; eagle and draft_model draft in the "
        "shape given below; ngram takes what followed the same tokens earlier in the row; none "
        "decodes plainly.",
    )
    head: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Folder of the EAGLE head (relative to the pipeline file) or 'demo:<name>'; "
        "null with the methods draft_model, ngram and none, allowed with auto.",
    )
    draft: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="A smaller model with the target's tokenizer that drafts, named as "
        "target.model is; for the method draft_model, allowed with auto.",
    )
    tree: Literal["dynamic", "static", "chain"] = Field(
        default="dynamic",
        description="Shape of the draft: dynamic (EAGLE-2), static (EAGLE-1) or chain.",
    )
    depth: int = Field(default=4, ge=1, le=32, description="Drafted levels below the root.")
    width: int = Field(default=4, ge=1, le=64, description="Children considered for each node.")
    nodes: int = Field(
        default=12,
        ge=1,
        le=1024,
        description="Drafted nodes for each row and round, the root excluded.",
    )
    ngram_branch: int | None = Field(
        default=None,
        ge=0,
        le=32,
        description="Most nodes of an n-gram branch beside what a head or draft model drafts: what "
        "followed the same tokens earlier in the row. With auto it is one more choice, of up to 16 "
        "nodes unless said otherwise; else null and 0 draft none.",
    )
    adapt: Annotated[Adapt | None, BeforeValidator(_adapt_switch)] = Field(
        default=None,
        description="Train a head on the job's own texts while it runs, switch it in when it "
        "drafts better, and leave it in the output's head/; true, or a section with its budget.",
    )
    paths: Annotated[tuple[RankPath, ...], Field(strict=False)] | None = Field(
        default=None,
        description="Paths of a static tree by child ranks, such as [0], [1], [0, 0]; null takes "
        "the 25 nodes of EAGLE-1.",
    )

    def _rules(self) -> list[tuple[bool, Rule]]:
        return [
            (
                self.method == "eagle" and self.head is None,
                (
                    ("head", "method"),
                    "found no head and method 'eagle'; name a head's folder or set method: none",
                ),
            ),
            (
                self.method == "auto" and self.tree == "static",
                (
                    ("tree", "method"),
                    "found static and auto, which chooses the tree itself; set method: eagle",
                ),
            ),
            *self._draft_rules(),
            (
                bool(self.ngram_branch) and (self.head or self.draft or self.adapt) is None,
                (
                    ("ngram_branch",),
                    "found neither head nor draft model; leave it out: n-grams draft alone then",
                ),
            ),
            (
                bool(self.ngram_branch) and self.tree == "static",
                (("ngram_branch", "tree"), "a static tree has no branch; set tree: dynamic"),
            ),
            (
                self.method in {"draft_model", "ngram", "none"} and self.head is not None,
                (
                    ("head", "method"),
                    f"found a head with {self.method!r}; remove the head or set method: auto",
                ),
            ),
            (
                self.paths is not None and self.tree != "static",
                (("paths", "tree"), f"found paths and tree {self.tree!r}; set tree: static"),
            ),
            (
                self.paths is not None and not _is_tree(self.paths),
                (
                    ("paths",),
                    "expected paths of ranks such as [0], [0, 0], each with its beginning listed",
                ),
            ),
            (
                (self.head or self.draft or self.adapt) is not None
                and self.tree == "dynamic"
                and self.nodes < self.depth,
                (
                    ("nodes", "depth"),
                    f"found {self.nodes} and {self.depth}; expected at least one node a level",
                ),
            ),
        ]

    def _adapt_rules(self) -> list[tuple[bool, Rule]]:
        return [
            (
                self.adapt is not None and self.method != "auto",
                (
                    ("adapt", "method"),
                    f"found adapt with {self.method!r}, which drafts with no new head; set auto",
                ),
            ),
            (
                self.adapt is not None and self.draft is not None,
                (("adapt", "draft"), "found both; adapt trains a head; remove one of them"),
            ),
        ]

    def _draft_rules(self) -> list[tuple[bool, Rule]]:
        return [
            *self._adapt_rules(),
            (
                self.method == "draft_model" and self.draft is None,
                (("draft", "method"), "found no draft model; name one, or set method: auto"),
            ),
            (
                self.draft is not None and self.method not in {"auto", "draft_model"},
                (
                    ("draft", "method"),
                    f"found a draft model with {self.method!r}; remove it or set method: auto",
                ),
            ),
            (
                self.draft is not None and self.head is not None and self.method == "auto",
                (("head", "draft"), "found both; expected a head or a draft model"),
            ),
            (
                self.draft is not None and self.tree == "static",
                (("draft", "tree"), "found a static tree, which needs a head; set tree: dynamic"),
            ),
        ]

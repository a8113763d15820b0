"""Chooses the draft shape of each round from what rounds have cost and yielded so far.

Pure: it sees the shape, the walks and the seconds of finished rounds and names the shape of the
next one; it reads no clock and touches no tensor. What a row gains with a shape hardly depends on
the batch, what a round costs does; so gains are kept by shape and costs by shape and number of
rows. A walk down a large tree tells what a smaller one inside it would have gained: so the largest
draft that is not too dear is tried first, and run again now and then, as a survey of all that lie
in it. A shape is tried only while it might still turn out the best. Plain decoding is always among
the shapes, so the choice falls back to it wherever drafting does not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

#: Row-rounds after which the first estimate of a shape is trusted.
_TRIAL_ROW_ROUNDS = 32
#: Rounds of a trial at least: the first round of a size is cold and its cost is not counted.
_TRIAL_ROUNDS = 3
#: Weight of the newest round in the running estimates of gains and of costs.
_GAIN_BLEND, _COST_BLEND = 0.01, 0.05
#: Rounds whose cost begins a running estimate.
_FIRST_COSTS = 4
#: Rounds between two probes of a shape that is not in use, and rounds of a probe.
_PROBE_EVERY, _PROBE_ROUNDS = 96, 3
#: Times as many between two where nothing is drafted: a head must catch up first.
_SELDOM = 4
#: Highest chance that a drafted token is accepted, where nothing was drafted yet.
_BEST_CHANCE = 0.9
#: Plain passes that the verification of a survey may cost, and the share of a measured ratio of
#: passes that is certain.
_DEAR, _LEAST_SHARE = 3.0, 0.95
#: Share of the rounds that surveys may cost, where drafts pay and where they do not, and the cost
#: of one, in rounds, above which there are none.
_SURVEY_SHARE, _SELDOM_SHARE, _SURVEY_MOST = 0.01, 0.0025, 1.0
#: Plain passes from which on a draft that never ran must be so much better, were it as good as
#: hoped, to be tried at all.
_COSTLY, _WORTH = 1.3, 1.3
#: Where rows are verified with what is worth it alone: shares of a tree's nodes that are, and of
#: the rows that have use for a branch.
_WORTH_IT, _BRANCHING = 0.5, 0.25
#: A shape whose estimate is below this share of the best is not probed again.
_HOPELESS = 0.85


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The draft of one round: levels, candidates of a node, drafted nodes; all 0 is plain.

    A branch may be deeper than the tree, and be there without one.
    """

    depth: int
    width: int
    nodes: int
    #: Most nodes of an n-gram branch beside the tree.
    branch: int = 0

    @property
    def reach(self) -> int:
        """Most drafted tokens that a row can gain."""
        return max(self.depth, self.branch)

    @property
    def tokens(self) -> int:
        """Most drafted tokens that are verified."""
        return self.nodes + self.branch

    @property
    def name(self) -> str:
        """Return the shape as the metrics name it."""
        if self == PLAIN:
            return "plain"
        branch = f",+{self.branch}" if self.branch else ""
        return f"{self.depth},{self.width},{self.nodes}{branch}"


PLAIN = Shape(0, 0, 0)


#: How many passes over some tokens one over other tokens costs.
PassRatio = Callable[[int, int], float]

#: The accepted nodes of a row, from the root down: each node's order and rank (see `DraftTree`).
Walk = Sequence[tuple[int, int]]


def would_accept(shape: Shape, ran: Shape, walk: Walk) -> int:
    """Return how many nodes of a walk down a draft that ran a smaller one would have held."""
    # A chain is the first child of the first child; how a tree ordered it does not matter.
    most = shape.nodes if shape.width > 1 else ran.nodes
    held = [rank < shape.width and order <= most for order, rank in walk[: shape.depth]]
    by_tree = held.index(False) if False in held else len(held)
    # A walk that ends in the branch went along it all the way, be it through nodes of the tree.
    along = bool(walk) and walk[-1][0] > ran.nodes
    return max(by_tree, min(len(walk), shape.branch) if along else 0)


def _lies_in(shape: Shape, ran: Shape) -> bool:
    """Whether a draft is, but for ties, a part of another that ran."""
    return (
        shape.branch <= ran.branch
        and shape.depth <= ran.depth
        and shape.width <= ran.width
        and shape.nodes <= ran.nodes
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is believed of one shape at one number of rows."""

    shape: Shape
    #: Tokens that a row gains in a round, the bonus token included.
    tokens_per_row: float
    #: Seconds of a round; None where it was never measured nor can be inferred.
    seconds: float | None
    rounds: int

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.tokens_per_row / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Mean:
    """A mean that becomes a running one once it has seen enough."""

    #: Least share of a new value.
    blend: float
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.weight += weight
        self.value += (value - self.value) * max(weight / self.weight, self.blend)


@dataclass(slots=True)
class _Cost:
    """What a round takes: of the first ones the mean without the slowest.

    A machine only ever disturbs upwards, and one long branch among few rounds says little.
    """

    value: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count > _FIRST_COSTS:
            self.value += (seconds - self.value) * _COST_BLEND
            return
        self.first.append(seconds)
        quickest = sorted(self.first)[: max(1, self.count - 1)]
        self.value = sum(quickest) / len(quickest)


def grid(
    depth: int, width: int, nodes: int, branch: int = 0, *, fitted: bool = False
) -> tuple[Shape, ...]:
    """Return the shapes to choose from, the given one being the largest; plain comes first.

    branch: nodes of an n-gram branch, which is then a choice alone and beside some of the trees.
    fitted: each row has no more nodes than are worth it, so that a shorter branch is no choice.
    """
    chains = [Shape(d, 1, d) for d in (1, 2, depth) if d <= depth]
    trees = [
        Shape(d, width, n)
        for d, n in (
            (2, 3),
            (3, 5),
            (3, 2 * nodes // 3),
            (depth, nodes // 2),
            (depth, 2 * nodes // 3),
            (depth, nodes),
        )
        if width > 1 and d <= depth and d < n <= nodes
    ]
    # Where memory is the limit, about eight tokens are verified at the price of one.
    beside = [PLAIN, *trees[:2], (trees or chains)[-1]]
    lengths = [b for b in ((branch,) if fitted else (branch // 2, branch)) if b]
    branches = [replace(shape, branch=b) for shape in beside for b in lengths]
    return tuple(dict.fromkeys([PLAIN, *chains, *trees, *branches]))


class Controller:
    """Keeps the estimates and names the next shape."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        passes: PassRatio | None = None,
        *,
        pass_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """Begin to learn.

        passes: (tokens, reference tokens) -> how many passes of the target over the reference one
        over the tokens costs, as a calibration has measured it. pass_seconds: what one
        over so many tokens takes, where each row is verified with no nodes but those that are worth
        it; see `price`.
        """
        assert PLAIN in shapes, "plain decoding must be a choice"
        self._shapes = tuple(shapes)
        self._passes: PassRatio = passes or (lambda _tokens, _reference: 1.0)
        self._pass_seconds = pass_seconds
        self._ragged = pass_seconds is not None
        self._cost: dict[tuple[Shape, int], _Cost] = {}
        #: What has run once at a bucket of rows.
        self._warm: set[tuple[Shape, int]] = set()
        self._total = 0
        #: The draft that tells most of others, by bucket of rows.
        self._surveys: dict[int, Shape] = {}
        #: Rounds that surveys may cost.
        self._credit = 0.0
        self.renew()

    def renew(self) -> None:
        """Forget what drafts gain, since another head drafts from now on; costs stay known."""
        #: Chance that the first token drafted by a chain, and any of those of a tree, is accepted.
        self._first = {False: _Mean(_GAIN_BLEND), True: _Mean(_GAIN_BLEND)}
        self._gain = {shape: _Mean(_GAIN_BLEND) for shape in self._shapes}
        self._rounds = dict.fromkeys(self._shapes, 0)
        self._probe: tuple[Shape, int] | None = None
        #: Shapes whose trial may not be over, by bucket of rows.
        self._open: dict[int, list[Shape]] = {}
        #: Estimates by number of rows, until the next round.
        self._known: dict[int, list[Estimate]] = {}

    def choose(self, rows: int) -> Shape:
        """Return the shape of the next round for so many rows."""
        bucket = _bucket(rows)
        if bucket not in self._open:
            self._open[bucket] = self._trials(rows)
        open_shapes = self._open[bucket]
        while open_shapes:
            if self._on_trial(open_shapes[0], rows):
                return open_shapes[0]
            open_shapes.pop(0)
        if self._probe is not None:
            return self._probe[0]
        return self._surveyed_or_best(rows)

    def _surveyed_or_best(self, rows: int) -> Shape:
        """Return the shape of a survey where one is due.

        Estimates of what is larger than the draft in use would otherwise rest on texts that are
        gone.
        """
        best, survey = self.best(rows), self._survey(rows)
        known = {e.shape: e for e in self.estimates(rows)}
        usual, other = known[best], known[survey]
        if survey in {best, PLAIN} or not other.seconds or not usual.seconds:
            return best
        # What the rounds that would have fitted into it would have made.
        cost = max(0.0, 1 - other.rate / usual.rate) * other.seconds / usual.seconds
        if cost > self._credit:
            return best
        self._credit -= cost
        return survey

    def _survey(self, rows: int) -> Shape:
        """Return the draft that tells most of others, of those that are not too dear to verify."""
        bucket = _bucket(rows)
        if bucket not in self._surveys:
            cheap = [s for s in self._shapes if self._pass_ratio(s, 1 << bucket) <= _DEAR]
            self._surveys[bucket] = max(cheap, key=lambda s: (self._told_by(s), *_size(s)))
        return self._surveys[bucket]

    def _told_by(self, shape: Shape) -> int:
        return sum(_lies_in(other, shape) for other in self._shapes)

    def best(self, rows: int) -> Shape:
        """Return the shape with the highest estimated rate; plain where nothing is better."""
        return max(self.estimates(rows), key=lambda e: (e.rate, e.shape == PLAIN)).shape

    def observe(self, shape: Shape, walks: Sequence[Walk], seconds: float) -> None:
        """Learn from one finished round: what it accepted in each row, and what it took."""
        rows = len(walks)
        self._known.clear()
        self._rounds[shape] += 1
        self._total += 1
        share = _SELDOM_SHARE if shape == PLAIN else _SURVEY_SHARE
        self._credit = min(_SURVEY_MOST, self._credit + share)
        for other, gain in self._gain.items():
            if other == shape:
                gain.add(1 + sum(map(len, walks)) / rows, rows)
            elif _lies_in(other, shape):
                held = sum(would_accept(other, shape, walk) for walk in walks)
                gain.add(1 + held / rows, rows)
        if shape.width:
            firsts = [walk[0] for walk in walks if walk and walk[0][0] <= shape.nodes]
            self._first[shape.width > 1].add(len(firsts) / rows, rows)
            if shape.width > 1:
                chain_hits = [rank == 0 for _, rank in firsts]
                self._first[False].add(sum(chain_hits) / rows, rows)
        # The first round of a size pays for allocations and kernels that the others find ready.
        if (shape, _bucket(rows)) in self._warm:
            self._cost.setdefault((shape, _bucket(rows)), _Cost()).add(seconds)
        self._warm.add((shape, _bucket(rows)))
        self._plan_probe(rows)

    def estimates(self, rows: int) -> list[Estimate]:
        """Return what is believed of every shape at so many rows."""
        if rows not in self._known:
            self._known[rows] = [
                Estimate(
                    shape, self._expected(shape), self._seconds(shape, rows), self._rounds[shape]
                )
                for shape in self._shapes
            ]
        return self._known[rows]

    def price(self, shape: Shape, rows: int) -> float:
        """Return what the verification of a node costs, in tokens that the batch makes meanwhile.

        At the mean slope of what a pass costs, from where rows draft nothing to where they draft a
        shape; 0 until anything is known, and where rows cannot differ.
        """
        if self._pass_seconds is None:
            return 0.0
        best = max(e.rate for e in self.estimates(rows))
        nodes = max(1.0, self._verified(shape))
        more = self._pass_seconds(rows + round(rows * nodes)) - self._pass_seconds(rows)
        return max(0.0, more) / nodes * best

    def plain_for_good(self, rows: int) -> bool:
        """Whether every shape was tried and none comes near plain decoding."""
        if self._open.get(_bucket(rows), self._shapes):
            return False
        found = {e.shape: e.rate for e in self.estimates(rows)}
        return all(
            rate < _HOPELESS * found[PLAIN] for shape, rate in found.items() if shape != PLAIN
        )

    def _expected(self, shape: Shape) -> float:
        """Return what a row gains: at least what it gains with a part of the draft.

        The estimate of a draft that has not run for long may be of texts that are gone.
        """
        return max(
            gain.value
            for other, gain in self._gain.items()
            if other == shape or _lies_in(other, shape)
        )

    def _trials(self, rows: int) -> list[Shape]:
        """Return the order in which shapes are tried at so many rows.

        The survey first, since it tells of all that lie in it; then the smallest, since what it
        accepts tells whether more is worth a trial.
        """
        survey = self._survey(rows)
        others = sorted((s for s in self._shapes if s not in {PLAIN, survey}), key=_size)
        return list(dict.fromkeys((PLAIN, survey, *others)))

    def _on_trial(self, shape: Shape, rows: int) -> bool:
        """Whether a shape is still being tried: too little is known, and it may yet be the best."""
        if shape == PLAIN:
            # What it costs is what all else is measured by, and differs from size to size.
            known = self._cost.get((PLAIN, _bucket(rows)))
            return known is None or known.count < _TRIAL_ROUNDS - 1
        seen = self._gain[shape].weight
        if self._rounds[shape] >= _TRIAL_ROUNDS and seen >= _TRIAL_ROW_ROUNDS:
            return False
        hoped = self._hoped(shape)
        seconds = self._seconds(shape, rows) or self._least_seconds(shape, rows)
        best = max(e.rate for e in self.estimates(rows))
        doubtful = not self._rounds[shape] and self._pass_ratio(shape, rows) > _COSTLY
        return hoped >= best * seconds * (_WORTH if doubtful else 1.0)

    def _hoped(self, shape: Shape) -> float:
        """Return what a row may gain at the best, by what was seen of this shape and of others."""
        tree, alone = replace(shape, branch=0), Shape(0, 0, 0, shape.branch)
        if shape not in {tree, alone} and tree in self._gain and alone in self._gain:
            # A row goes whichever of the two ways is longer.
            hoped: float = self._hoped(tree) + self._hoped(alone) - 1
        else:
            chance = _BEST_CHANCE if shape.branch else self._first_chance(tree=shape.width > 1)
            hoped = sum(chance**level for level in range(shape.reach + 1))
        seen = self._gain[shape].weight
        if seen < _TRIAL_ROUNDS:
            return hoped
        # A round yields 1 to reach + 1 tokens: two standard errors of the mean at the most.
        return min(hoped, self._expected(shape) + shape.reach / sqrt(seen))

    def _first_chance(self, *, tree: bool) -> float:
        """Return how often a first token may be accepted at the best."""
        first = self._first[tree]
        if first.weight >= _TRIAL_ROUNDS:
            return min(_BEST_CHANCE, first.value + 1 / sqrt(first.weight))
        if not tree:
            return _BEST_CHANCE
        # All siblings together do about as well as a second try would.
        missed = 1 - self._first_chance(tree=False)
        return min(_BEST_CHANCE, 1 - missed * missed)

    def _least_seconds(self, shape: Shape, rows: int) -> float:
        """Return what an untried shape costs at least: as much as any smaller one, and its pass.

        Unless rows draw their own, a branch counts in full, since some row may have use for it.
        """
        known = [
            e.seconds
            for e in self.estimates(rows)
            if e.seconds
            and e.shape.depth <= shape.depth
            and e.shape.nodes <= shape.nodes
            and e.shape.branch <= shape.branch
        ]
        plain = self._seconds(PLAIN, rows) or 0.0
        return max([*known, _LEAST_SHARE * plain * self._pass_ratio(shape, rows)])

    def _pass_ratio(self, shape: Shape, rows: int) -> float:
        """Return how many plain passes the verification of a draft costs."""
        return self._passes(rows + round(rows * self._verified(shape)), rows)

    def _verified(self, shape: Shape) -> float:
        """Return how many nodes of a row are verified, about."""
        if not self._ragged:
            return shape.tokens
        return _WORTH_IT * shape.nodes + _BRANCHING * shape.branch

    def _plan_probe(self, rows: int) -> None:
        """Now and then run a promising shape that is not in use: acceptance and costs drift."""
        if self._probe is not None:
            shape, left = self._probe
            self._probe = (shape, left - 1) if left > 1 else None
            return
        if self._total % _PROBE_EVERY or self._open.get(_bucket(rows)):
            return
        found = sorted(self.estimates(rows), key=lambda e: -e.rate)
        if found[0].shape == PLAIN and self._total % (_PROBE_EVERY * _SELDOM):
            return
        others = [e for e in found[1:] if e.rate >= _HOPELESS * found[0].rate]
        if others:
            stalest = min(others, key=lambda e: e.rounds)
            self._probe = (stalest.shape, _PROBE_ROUNDS)

    def _seconds(self, shape: Shape, rows: int) -> float | None:
        """Return the cost of a round, inferred from other numbers of rows where never measured."""
        bucket = _bucket(rows)
        known = self._cost.get((shape, bucket))
        if known is not None:
            return known.value
        inferred = [
            (abs(there - bucket), cost.value * ratio)
            for (other, there), cost in self._cost.items()
            if other == shape
            for ratio in self._ratios(shape, bucket, there)
        ]
        if not inferred:
            return None
        # A pass over drafts costs what one without costs at least; nodes that were left out there
        # may be worth it here.
        plain = self._cost.get((PLAIN, bucket))
        return max(min(inferred)[1], 0.0 if plain is None or shape == PLAIN else plain.value)

    def _ratios(self, shape: Shape, bucket: int, there: int) -> Iterator[float]:
        """Yield what a round at one number of rows costs in rounds at another.

        As a shape that was measured at both, and then as the tokens of their passes.
        """
        rows, reference_rows = 1 << bucket, 1 << there
        for same in self._shapes:
            here, reference = self._cost.get((same, bucket)), self._cost.get((same, there))
            if here is not None and reference is not None:
                passes = self._pass_ratio(shape, rows) / self._pass_ratio(same, rows)
                passes *= self._pass_ratio(same, reference_rows)
                passes /= self._pass_ratio(shape, reference_rows)
                yield here.value / reference.value * passes


def _size(shape: Shape) -> tuple[int, ...]:
    return (shape.tokens, shape.nodes, shape.depth, shape.width)


def _bucket(rows: int) -> int:
    """Numbers of rows that cost about the same: 1, 2, 3-4, 5-8, 9-16, ..."""
    return max(0, rows - 1).bit_length()

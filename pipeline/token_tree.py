"""The token tree of a session: everything that was rendered and sampled, by token ids.

A path from the root is a context that the model has had, token by token. A node is a run of tokens
of one origin: **rendered** by a template or a client, or **sampled** by the engine. Each sample has
nodes of its own, so that two samples with equal tokens stay apart. A prompt goes along the path
with which it agrees longest; where it differs, the tree forks, and the rest of the prompt is
rendered. So a sampled token in a prompt stays sampled exactly if all tokens before it are those
after which it was sampled.

The tree is a function of the set of turns. A prompt is longer than all prompts that it continues,
so turns join in the order of their prompts' lengths, not of their arrival.

    system, user ──► sample ──► tool's result ──► sample ──► user ──► sample     a path: one example
                          └───► sample 2 (n = 2)                                 another
                     (token 17) └──► re-rendered history ──► sample              another, a fork
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ..bus.public import CompletionSample, FinishReason
from ..bus.trees import Turn, read
from ..config import RequestError, shown
from ..store.trees import TreeStore
from .rollouts import TrainingSample, completion_of


class SampledSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of one sample in a path, all of it or its beginning.

    Attributes:
        start, stop: The tokens' places in the path.
        request_id: Id of the request.
        sample_index: Index of the sample in its request.
        num_tokens: All tokens of the sample; more than `stop - start` where the next turn's prompt
            differs before its end.
        finish_reason: Of the whole sample.
        model: The model, or the adapter, that sampled.
        adapter_version: Version of the adapter; 0 without one.
    """

    start: int
    stop: int
    request_id: str
    sample_index: int
    num_tokens: int
    finish_reason: FinishReason
    model: str = ""
    adapter_version: int = 0


class SessionSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One path of a session's token tree, from the root to a leaf: one example to train on.

    Attributes:
        session: The session's id.
        path: Number of the path in the session.
        token_ids: `[tokens]`, exactly as the model had them.
        loss_mask: `[tokens]`, 1 where the engine sampled, 0 where tokens were rendered.
        logprobs: `[tokens]`, as sampled; 0 where rendered.
        weight_versions: `[tokens]`, version of the weights that sampled; -1 where rendered.
        spans: The sampled tokens' samples, in order.
        num_shared: Leading tokens that an earlier path has, too. Sampled tokens among them are in
            both; a trainer that counts each token once sets their mask to 0.
        finish_reason: Of the last sample.
        support_logprobs: `[tokens]`, log S, 0 where there is none; None if no sample has it.
        ref_logprobs: `[tokens]`, by the reference model; likewise.
        images: Ids of the images in the path, in order.
    """

    session: str
    path: int
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    spans: list[SampledSpan]
    num_shared: int
    finish_reason: FinishReason
    support_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    images: tuple[str, ...] = ()


_COLUMNS = ("support_logprobs", "ref_logprobs")
"""Optional columns of CompletionSample, `[k]`."""


class TreeNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node of a token tree, for clients.

    Attributes:
        id: Its number; parents have smaller ones.
        parent: Number of the node before; -1 at the root.
        start: Place of its first token in its paths.
        token_ids: Its tokens.
        request_id: The request that sampled them; "" if they were rendered.
        sample_index: The sample's index in its request.
        offset: Tokens of the sample before these.
        finish_reason: The sample's, in its last node; "" otherwise.
    """

    id: int
    parent: int
    start: int
    token_ids: tuple[int, ...]
    request_id: str = ""
    sample_index: int = 0
    offset: int = 0
    finish_reason: FinishReason | str = ""


class _Origin(NamedTuple):
    """A sample of a turn."""

    turn: Turn
    sample: CompletionSample


class _Node:
    """A run of tokens of one origin.

    Attributes:
        origin: None for rendered tokens.
        offset: Tokens of the sample before these.
        images: Images of the turn that made the node.
        start: Place of its first token in its paths.
    """

    __slots__ = ("children", "images", "offset", "origin", "parent", "start", "tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        parent: _Node | None,
        origin: _Origin | None = None,
        offset: int = 0,
        images: tuple[str, ...] = (),
    ) -> None:
        self.tokens = tuple(tokens)
        self.parent = parent
        self.origin = origin
        self.offset = offset
        self.images = images
        self.children: list[_Node] = []
        self.start: int = 0 if parent is None else parent.stop
        if parent is not None:
            parent.children.append(self)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def split(self, number: int) -> None:
        """Leave the node so many tokens; the others, and its children, move to a child."""
        if number == len(self.tokens):
            return
        children, self.children = self.children, []
        rest, self.tokens = self.tokens[number:], self.tokens[:number]
        child = _Node(rest, self, self.origin, self.offset + number, self.images)
        child.children = children
        for each in children:
            each.parent = child

    def path(self) -> list[_Node]:
        """Return the nodes from the root to this one, without the root."""
        found, node = list[_Node](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class TokenTree:
    """The token tree of a session.

    Attributes:
        session: The session's id.
        turns: The turns, in the order in which they joined.
        lost: Identities of the entries of turns for which the store had no room.
    """

    def __init__(self, session: str, turns: Iterable[Turn], lost: Sequence[str] = ()) -> None:
        self.session = session
        self.lost = tuple(lost)
        self.turns = sorted(turns, key=lambda turn: (len(turn.prompt), *_order(turn.key)))
        self._root = _Node((), None)
        for turn in self.turns:
            self._join(turn)

    def __repr__(self) -> str:
        lost = f", lost={len(self.lost)}" if self.lost else ""
        return f"TokenTree({self.session!r}, {len(self.turns)} turns{lost})"

    @classmethod
    def of(cls, samples: Iterable[TrainingSample], session: str = "") -> TokenTree:
        """Return the tree of samples of an engine in this process, each a turn of its own."""
        turns = [_turn_of(sample, place) for place, sample in enumerate(samples)]
        return cls(session, turns)

    def continues(self, turn: Turn) -> int:
        """Return how many leading tokens of a turn's prompt are on a path of the tree."""
        return self._find(turn)[1]

    def samples(self) -> list[SessionSample]:
        """Return the paths that end with a sample, in the order of the tree."""
        found = list[SessionSample]()
        before: list[_Node] = []
        for leaf in self._leaves():
            nodes = leaf.path()
            shared = 0
            for own, other in zip(nodes, before, strict=False):
                if own is not other:
                    break
                shared = own.stop
            found.append(self._sample(len(found), nodes, shared))
            before = nodes
        return found

    def nodes(self) -> list[TreeNode]:
        """Return all nodes, parents first."""
        numbers, found = {id(self._root): -1}, list[TreeNode]()
        for node in self._walk():
            assert node.parent is not None
            numbers[id(node)] = len(found)
            more: dict[str, Any] = {}
            if node.origin is not None:
                turn, sample = node.origin
                ends = node.offset + len(node.tokens) == len(sample.token_ids)
                more = {
                    "request_id": turn.request_id,
                    "sample_index": sample.sample_index,
                    "offset": node.offset,
                    "finish_reason": sample.finish_reason if ends else "",
                }
            parent = numbers[id(node.parent)]
            found.append(TreeNode(len(found), parent, node.start, node.tokens, **more))
        return found

    def _join(self, turn: Turn) -> None:
        node, number, in_node = self._find(turn)
        node.split(in_node)
        if rest := turn.prompt[number:]:
            node = _Node(rest, node, images=turn.images)
        for sample in turn.samples:
            if sample.token_ids:
                _Node(sample.token_ids, node, _Origin(turn, sample), images=turn.images)

    def _find(self, turn: Turn) -> tuple[_Node, int, int]:
        """Return the node to which a prompt leads: itself, the prompt's tokens on its path, and how
        many of them are the node's own."""
        prompt, best = turn.prompt, (self._root, 0, 0)
        # Of equally long paths the first one counts, and sampled tokens before rendered ones.
        open_nodes = [best]
        while open_nodes:
            node, stop, common = open_nodes.pop()
            if stop > best[1]:
                best = (node, stop, common)
            if common < len(node.tokens):
                continue
            children = sorted(node.children, key=_is_sampled, reverse=True)
            for child in reversed(children):
                if child.images != turn.images[: len(child.images)]:
                    continue
                if found := _common(child.tokens, prompt, stop):
                    open_nodes.append((child, stop + found, found))
        return best

    def _walk(self) -> Iterator[_Node]:
        """Yield all nodes but the root, parents first, in the order of their children."""
        waiting = self._root.children[::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children[::-1]

    def _leaves(self) -> Iterator[_Node]:
        return (node for node in self._walk() if not node.children and node.origin is not None)

    def _sample(self, path: int, nodes: Sequence[_Node], shared: int) -> SessionSample:
        token_ids, spans = list[int](), list[SampledSpan]()
        number = nodes[-1].stop
        mask, logprobs, versions = [0] * number, [0.0] * number, [-1] * number
        columns: dict[str, list[float]] = {}
        for node in nodes:
            token_ids += node.tokens
            if node.origin is None:
                continue
            turn, sample = node.origin
            own, place = slice(node.start, node.stop), slice(node.offset, _end(node))
            mask[own] = [1] * len(node.tokens)
            logprobs[own] = sample.logprobs[place]
            versions[own] = _versions(sample)[place]
            for name in _COLUMNS:
                if (values := getattr(sample, name, None)) is not None:
                    columns.setdefault(name, [0.0] * number)[own] = values[place]
            if node.offset:  # more of the sample that the node before began
                spans[-1] = msgspec.structs.replace(spans[-1], stop=node.stop)
                continue
            spans.append(
                SampledSpan(
                    node.start,
                    node.stop,
                    turn.request_id,
                    sample.sample_index,
                    len(sample.token_ids),
                    sample.finish_reason,
                    turn.model,
                    sample.adapter_version,
                )
            )
        return SessionSample(
            self.session,
            path,
            token_ids,
            mask,
            logprobs,
            versions,
            spans,
            shared,
            spans[-1].finish_reason,
            images=nodes[-1].images,
            **columns,
        )


async def read_tree(trees: TreeStore, tenant: str, session: str) -> TokenTree:
    """Return the token tree of a session.

    Raises:
        RequestError: unknown_session.
        BusError: The transport can't be reached.
    """
    found = await read(trees, tenant, session)
    if found is None and not trees.enabled:
        raise RequestError(
            f"there is no session {shown(session)} here: no token trees are kept, since "
            "bus.trees_max_bytes is 0; set it, and run the session again",
            code="unknown_session",
        )
    if found is None:
        raise unknown_session(session)
    return TokenTree(session, found.turns, found.lost)


def unknown_session(session: str) -> RequestError:
    """There is no such session, or the caller may not read it."""
    return RequestError(
        f"there is no session {shown(session)} here: none of its requests has sampled a token, it "
        "was deleted, is another tenant's or by a model that the key is not for, or has expired "
        "(bus.trees_ttl_s); run it again",
        code="unknown_session",
    )


def check_complete(tree: TokenTree) -> None:
    """Raises RequestError, `session_incomplete`, if turns of a session are lost."""
    if tree.lost:
        raise RequestError(
            f"{len(tree.lost)} turns of the session are lost, since its tenant's share of "
            "bus.trees_max_bytes was used up; export and delete other sessions or raise it, or ask "
            "for the samples that there are (partial)",
            code="session_incomplete",
        )


def _is_sampled(node: _Node) -> bool:
    return node.origin is not None


def _common(tokens: tuple[int, ...], prompt: tuple[int, ...], at: int) -> int:
    """Return how many leading tokens of a node are in a prompt from a place on."""
    if not (at < len(prompt) and tokens[0] == prompt[at]):
        return 0
    piece = prompt[at : at + len(tokens)]
    if piece == tokens:
        return len(tokens)
    pairs = zip(tokens, piece, strict=False)
    return next((i for i, (own, other) in enumerate(pairs) if own != other), len(piece))


def _end(node: _Node) -> int:
    return node.offset + len(node.tokens)


def _versions(sample: CompletionSample) -> list[int]:
    """Return the version of the weights of each token."""
    number = len(sample.token_ids)
    found = [sample.weight_version] * number
    for version, start in sample.weight_versions:
        found[start:] = [version] * (number - start)
    return found


def _order(key: str) -> tuple[int | str, ...]:
    """Return the order of entries: by the numbers of their ids, if they have some."""
    entry, _, rest = key.partition(" ")
    numbers = entry.split("-")
    if all(each.isascii() and each.isdigit() for each in numbers):
        return (0, *(f"{int(each):020d}" for each in numbers), rest)
    return (1, key)


def _turn_of(sample: TrainingSample, place: int) -> Turn:
    recipe = sample.recipe
    return Turn(
        key=f"{place}",
        request_id=str(place if sample.request_id is None else sample.request_id),
        model="" if recipe is None else recipe.adapter,
        prompt=sample.prompt_tokens,
        samples=completion_of(sample).samples,
        images=() if recipe is None else recipe.images,
    )

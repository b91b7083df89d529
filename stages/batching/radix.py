"""A prefix cache indexed by a radix tree of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TypeAlias

from ...bus.messages import CacheScope
from .allocation import Allocation
from .block_hash import common_length
from .cache import KVCacheManager, Prefix

TOKEN = "q"
"""The array type of token ids: 64 bits."""

Run: TypeAlias = "array[int]"


class Node:
    """A run of tokens within one block; the path from the root to it is a cached prefix.

    A run never crosses a block boundary, so splitting and evicting take the same time in a tree of
    any size. Where sequences diverge within a block the run is split, and each branch ends in a
    block of its own, which holds the common tokens too.

    Attributes:
        tokens: The run, at most a block of tokens.
        end: Offset of the run's end within its block; the block size at a block's end.
        block: The block with the tokens up to `end`; -1 where sequences diverge within the block.
        only: The child, if there is just one.
        branches: Children by their first token, if there are several. Most nodes don't need this
            dict, which takes more memory than the rest of the node.
    """

    __slots__ = ("block", "branches", "end", "only", "parent", "tokens")

    def __init__(self, tokens: Run, end: int, block: int, parent: Node | None) -> None:
        self.tokens = tokens
        self.end = end
        self.block = block
        self.parent = parent
        self.only: Node | None = None
        self.branches: dict[int, Node] | None = None

    def children(self) -> list[Node]:
        """Return all children."""
        if self.branches is not None:
            return list(self.branches.values())
        return [] if self.only is None else [self.only]

    def child(self, token: int) -> Node | None:
        """Return the child that begins with `token`."""
        only = self.only
        if only is not None:
            return only if only.tokens[0] == token else None
        return None if self.branches is None else self.branches.get(token)

    def put(self, child: Node) -> None:
        """Add a child, or replace the one that begins with the same token."""
        token = child.tokens[0]
        if self.branches is not None:
            self.branches[token] = child
        elif self.only is None or self.only.tokens[0] == token:
            self.only = child
        else:
            self.branches = {self.only.tokens[0]: self.only, token: child}
            self.only = None

    def drop(self, child: Node) -> None:
        """Remove a child."""
        if self.branches is None:
            self.only = None
        else:
            del self.branches[child.tokens[0]]
            if not self.branches:
                self.branches = None


class Root(Node):
    """The root of one scope's tree."""

    __slots__ = ("scope",)

    def __init__(self, scope: CacheScope, block_size: int) -> None:
        super().__init__(array(TOKEN), block_size, -1, None)
        self.scope = scope


class RadixKVCache(KVCacheManager):
    """Prefixes are found token by token; whole blocks are shared, the rest of a match is copied.

    Each scope has a tree of its own; a new weight version starts without trees.

    Free leaves are evicted, least recently used first, without a clock or a search: the holder of a
    block also holds the blocks before it and frees them later, so blocks are evicted in the order
    in which they became free. The one exception is a block indexed after another sequence's copy
    of its own prefix: evicting that copy also removes the block from the index.

    The nodes of an allocation are those at the ends of its full blocks.
    """

    def num_cached_blocks(self) -> int:
        # Built-in counting is fast enough to be called between steps.
        return len(self._nodes) - self._nodes.count(None)

    def _find(self, allocation: Allocation) -> Prefix:
        size, token_ids, nodes = self.block_size, allocation.token_ids, allocation.nodes
        most = allocation.most_cached()
        # Start after the nodes that were found before and are still indexed.
        del nodes[max(most, 0) // size :]
        node = self._last_alive(allocation)
        matched = size
        while matched == size:
            start = len(nodes) * size
            run = array(TOKEN, token_ids[start : min(start + size, most)])
            node, matched = self._descend(node, run)
            if matched == size:
                nodes.append(node)
        allocation.num_known = len(nodes)
        block_ids = [shared.block for shared in nodes]
        if matched == 0:
            return Prefix(block_ids)
        while node.block == -1:
            node = node.children()[0]
        return Prefix(block_ids, node.block, matched)

    def _index(self, allocation: Allocation, num_tokens: int) -> int:
        size, token_ids, nodes = self.block_size, allocation.token_ids, allocation.nodes
        # Where an equal block of another sequence was evicted, the sequence's own takes its place.
        node = self._last_alive(allocation)
        first = len(nodes)
        for index in range(first, -(-num_tokens // size)):
            run = array(TOKEN, token_ids[index * size : min((index + 1) * size, num_tokens)])
            node = self._insert(node, run, allocation.block_ids[index])
            if len(run) == size:
                nodes.append(node)
        allocation.num_known = len(nodes)
        return first

    def _last_alive(self, allocation: Allocation) -> Node:
        """Drop evicted nodes from an allocation's end; return the last one left, or else the root.

        The root of a new tree is stored with its first child.
        """
        nodes: list[Node] = allocation.nodes
        while nodes:
            node = nodes[-1]
            if self._nodes[node.block] is node:
                return node
            nodes.pop()
        return self._roots.get(allocation.scope) or Root(allocation.scope, self.block_size)

    def _descend(self, node: Node, run: Run) -> tuple[Node, int]:
        """Follow up to a block of tokens from a block boundary.

        Returns:
            The last node with an equal token (`node` if there is none), and the number of equal
            tokens.
        """
        matched = 0
        while matched < len(run):
            child = node.child(run[matched])
            if child is None:
                break
            node = child
            rest = run[matched:] if matched else run
            if child.tokens != rest[: child.end - matched]:
                return node, matched + common_length(child.tokens, rest)
            matched = child.end
        return node, matched

    def _insert(self, parent: Node, run: Run, block: int) -> Node:
        """Insert a block's tokens at a block boundary; return the node where they end.

        A block with these tokens that is indexed already stays the one to be found.
        """
        node, matched = self._descend(parent, run)
        if matched == len(run):
            return node
        if matched and matched < node.end:
            node = self._split(node, matched)
        if matched and node.block != -1:
            # The node was a partial block: the same one has grown, or a longer equal one came.
            node.tokens += run[matched:]
            node.end = len(run)
            if node.block != block:
                self._nodes[node.block] = None
                self._demote(node.block)
                node.block = block
                self._nodes[block] = node
            return node
        leaf = Node(run[matched:], len(run), block, node)
        node.put(leaf)
        if isinstance(node, Root):
            self._roots[node.scope] = node
        self._nodes[block] = leaf
        return leaf

    def _split(self, node: Node, end: int) -> Node:
        """Split a run at `end` within its block; return the new node of the upper part."""
        assert node.parent is not None
        cut = len(node.tokens) - (node.end - end)
        upper = Node(node.tokens[:cut], end, -1, node.parent)
        node.parent.put(upper)
        node.tokens = node.tokens[cut:]
        node.parent = upper
        upper.put(node)
        return upper

    def _end_of(self, allocation: Allocation, num_known: int) -> Hashable:
        node: Node = allocation.nodes[num_known - 1]
        return node

    def _is_indexed(self, block_id: int) -> bool:
        return self._nodes[block_id] is not None

    def is_indexed_whole(self, block_id: int) -> bool:
        # A sequence's full block is in the tree with all of its tokens, or not at all.
        return self._nodes[block_id] is not None

    def _forget(self, block_id: int) -> None:
        node = self._nodes[block_id]
        if node is None:
            return
        self._nodes[block_id] = None
        stack = node.children()
        while stack:
            below = stack.pop()
            stack += below.children()
            if below.block != -1:
                self._nodes[below.block] = None
                self._hide(below.block)
        # Nodes within a block have no block of their own: remove them with their last branch.
        while (parent := node.parent) is not None:
            node.parent = None
            parent.drop(node)
            if parent.only or parent.branches:
                return
            if isinstance(parent, Root):
                del self._roots[parent.scope]
            if parent.end == self.block_size:
                return
            node = parent

    def _forget_all(self) -> None:
        self._roots: dict[CacheScope, Root] = {}
        self._nodes: list[Node | None] = [None] * self.num_blocks

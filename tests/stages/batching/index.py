"""Checks of a prefix cache's index against itself."""

from __future__ import annotations

from nano_inference.stages.batching import KVCacheManager
from nano_inference.stages.batching.paged import PagedKVCache
from nano_inference.stages.batching.radix import Node, RadixKVCache


def check_index(cache: KVCacheManager) -> None:
    """Check the whole index, in time that grows with it.

    Raises:
        AssertionError: It contradicts itself.
    """
    if isinstance(cache, PagedKVCache):
        check_hashes(cache)
    else:
        assert isinstance(cache, RadixKVCache)
        check_tree(cache)


def check_hashes(cache: PagedKVCache) -> None:
    named = {b: h for b, h in enumerate(cache._indexed) if h is not None}
    assert named == {b: h for h, b in cache._block_of.items()}, "names do not match blocks"
    latest = {b: run[0] for b, run in enumerate(cache._runs) if run is not None}
    assert latest == {b: p for p, b in cache._latest.items()}, "runs do not match blocks"


def check_tree(cache: RadixKVCache) -> None:
    in_tree: dict[int, Node] = {}
    stack = [child for root in cache._roots.values() for child in root.children()]
    assert all(root.children() for root in cache._roots.values()), "an empty tree was kept"
    while stack:
        node = stack.pop()
        stack += node.children()
        parent = node.parent
        assert parent is not None, "a node in the tree has no parent"
        assert parent.child(node.tokens[0]) is node, "a node is not its parent's child"
        assert node.end == parent.end % cache.block_size + len(node.tokens), "a run is misplaced"
        inside = node.end < cache.block_size
        assert (node.block == -1) == (inside and bool(node.children())), "a block is misplaced"
        if node.block != -1:
            assert node.block not in in_tree, "a block hangs in two places"
            in_tree[node.block] = node
    named = {b: node for b, node in enumerate(cache._nodes) if node is not None}
    assert named == in_tree, "names do not match the tree"

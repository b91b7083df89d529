"""Token trees of sessions: paths of token ids, and what was sampled in them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference import RequestError, TrainingSample
from nano_inference.bus.public import CompletionSample
from nano_inference.bus.trees import Turn
from nano_inference.pipeline.token_tree import SessionSample, TokenTree, check_complete


def sampled(*token_ids: int, index: int = 0, first: int = 0, **more: object) -> CompletionSample:
    """A sample, whose logprobs are minus its tokens."""
    fields = {
        "sample_index": index,
        "text": "",
        "token_ids": token_ids,
        "logprobs": tuple(-float(token) for token in token_ids),
        "finish_reason": "stop",
        "weight_version": first,
        "weight_versions": ((first, 0),),
    }
    return CompletionSample(**(fields | more))  # type: ignore[arg-type]


def turn(number: int, prompt: Iterable[int], *samples: CompletionSample, **more: object) -> Turn:
    key = f"{number}-0 r{number}"
    return Turn(
        key=key,
        request_id=f"r{number}",
        prompt=tuple(prompt),
        samples=samples,
        **more,  # type: ignore[arg-type]
    )


def paths(turns: Iterable[Turn]) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss mask of each path."""
    return [(each.token_ids, each.loss_mask) for each in TokenTree("s", turns).samples()]


FIRST = turn(1, [1, 2, 3], sampled(7, 8, 9))


def test_a_prompt_that_extends_a_path_keeps_its_sampled_tokens() -> None:
    second = turn(2, [1, 2, 3, 7, 8, 9, 4, 5], sampled(6, first=2))
    (found,) = TokenTree("s", [second, FIRST]).samples()
    assert found.token_ids == [1, 2, 3, 7, 8, 9, 4, 5, 6]
    assert found.loss_mask == [0, 0, 0, 1, 1, 1, 0, 0, 1]
    assert found.logprobs == [0, 0, 0, -7, -8, -9, 0, 0, -6]
    assert found.weight_versions == [-1, -1, -1, 0, 0, 0, -1, -1, 2]
    assert [(each.request_id, each.start, each.stop) for each in found.spans] == [
        ("r1", 3, 6),
        ("r2", 8, 9),
    ]


def test_a_prompt_that_differs_forks_the_tree() -> None:
    """The template has written the history anew, with another token in place of 9."""
    second = turn(2, [1, 2, 3, 7, 8, 10, 4], sampled(6))
    kept, other = TokenTree("s", [FIRST, second]).samples()
    assert (kept.token_ids, kept.loss_mask) == ([1, 2, 3, 7, 8, 9], [0, 0, 0, 1, 1, 1])
    assert other.token_ids == [1, 2, 3, 7, 8, 10, 4, 6]
    assert other.loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]
    assert other.num_shared == 5
    assert [(each.stop, each.num_tokens) for each in other.spans] == [(5, 3), (8, 1)]
    assert [(each.stop, each.num_tokens) for each in kept.spans] == [(6, 3)]


def test_a_prompt_that_is_the_beginning_of_another_shares_its_path() -> None:
    assert paths([turn(1, [1, 2, 3, 4], sampled(7)), turn(2, [1, 2], sampled(8))]) == [
        ([1, 2, 8], [0, 0, 1]),
        ([1, 2, 3, 4, 7], [0, 0, 0, 0, 1]),
    ]


def test_equal_samples_stay_apart() -> None:
    both = turn(1, [1], sampled(7, 8), sampled(7, 8, index=1))
    assert paths([both]) == [([1, 7, 8], [0, 1, 1])] * 2
    second = turn(2, [1, 7, 8, 2], sampled(9))
    first, other = TokenTree("s", [both, second]).samples()
    assert [each.sample_index for each in first.spans] == [0, 0], "the first one is continued"
    assert [(each.request_id, each.sample_index) for each in other.spans] == [("r1", 1)]


def test_the_longest_path_wins_over_the_first() -> None:
    both = turn(1, [1], sampled(7, 8, 2), sampled(7, 8, 3, index=1))
    second = turn(2, [1, 7, 8, 3, 4], sampled(9))
    assert ([1, 7, 8, 3, 4, 9], [0, 1, 1, 1, 0, 1]) in paths([both, second])


def test_a_sampled_token_wins_over_an_equal_rendered_one() -> None:
    given_by_the_client = turn(1, [1, 7, 5], sampled(6))
    same = turn(2, [1], sampled(7))
    third = turn(3, [1, 7, 4, 4], sampled(9))
    assert ([1, 7, 4, 4, 9], [0, 1, 0, 0, 1]) in paths([given_by_the_client, same, third])


def test_other_images_under_equal_tokens_are_another_path() -> None:
    first = turn(1, [1, 0, 0, 2], sampled(7), images=("a",))
    same = turn(2, [1, 0, 0, 2, 7, 0, 0], sampled(8), images=("a", "b"))
    other = turn(3, [1, 0, 0, 2, 7, 3], sampled(9), images=("c",))
    found = TokenTree("s", [first, same, other]).samples()
    assert [(each.images, sum(each.loss_mask)) for each in found] == [(("a", "b"), 2), (("c",), 1)]


def test_optional_columns_are_there_if_some_sample_has_them() -> None:
    second = turn(2, [1, 2, 3, 7, 8, 9], sampled(6, ref_logprobs=(-0.5,)))
    (found,) = TokenTree("s", [FIRST, second]).samples()
    assert found.ref_logprobs == [0, 0, 0, 0, 0, 0, -0.5]
    (plain,) = TokenTree("s", [FIRST]).samples()
    assert plain.ref_logprobs is None


def test_samples_of_an_engine_make_a_tree() -> None:
    first = TrainingSample((1, 2), (7, 8), (-1.0, -2.0), None, 3, "stop", ((3, 0), (4, 1)))
    second = TrainingSample((1, 2, 7, 8, 5), (6,), (-3.0,), None, 4, "length")
    (found,) = TokenTree.of([first, second]).samples()
    assert found.weight_versions == [-1, -1, 3, 4, -1, 4]
    assert found.finish_reason == "length"


def test_lost_turns_are_refused_unless_asked_for() -> None:
    check_complete(TokenTree("s", [FIRST]))
    with pytest.raises(RequestError) as refused:
        check_complete(TokenTree("s", [FIRST], ["2-0"]))
    assert refused.value.code == "session_incomplete"


def test_nodes_are_the_tree() -> None:
    second = turn(2, [1, 2, 3, 7, 8, 10], sampled(6))
    nodes = TokenTree("s", [FIRST, second]).nodes()
    assert [(each.parent, each.start, each.token_ids) for each in nodes] == [
        (-1, 0, (1, 2, 3)),
        (0, 3, (7, 8)),
        (1, 5, (9,)),
        (1, 5, (10,)),
        (3, 6, (6,)),
    ]
    assert [(each.request_id, each.offset, each.finish_reason) for each in nodes[1:3]] == [
        ("r1", 0, ""),
        ("r1", 2, "stop"),
    ]


# --- any session ----------------------------------------------------------------------------------


def conversation(seed: int) -> list[Turn]:
    """Turns that continue, change and repeat earlier ones, in few tokens."""
    drawn, turns = random.Random(seed), list[Turn]()
    for number in range(drawn.randint(1, 7)):
        context = list[int]()
        if turns and drawn.random() < 0.8:
            before = drawn.choice(turns)
            context = [*before.prompt, *drawn.choice(before.samples).token_ids]
            if drawn.random() < 0.4:
                context[drawn.randrange(len(context))] = drawn.randrange(3)
        context += drawn.choices(range(3), k=drawn.randint(1, 3))
        samples = [
            sampled(*drawn.choices(range(3), k=drawn.randint(1, 3)), index=index)
            for index in range(drawn.randint(1, 3))
        ]
        turns.append(turn(number, context, *samples))
    return turns


def matched(prompt: Sequence[int], path: Sequence[int]) -> int:
    pairs = zip(prompt, path, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(path)))


def check_paths(turns: Sequence[Turn], found: Sequence[SessionSample]) -> None:
    """Each sampled token is after the tokens after which it was sampled, and each is there."""
    samples = {
        (each.request_id, own.sample_index): (each, own) for each in turns for own in each.samples
    }
    whole = set()
    for path in found:
        ones = [0] * len(path.token_ids)
        for span in path.spans:
            of, own = samples[span.request_id, span.sample_index]
            assert tuple(path.token_ids[: span.start]) == of.prompt
            number = span.stop - span.start
            assert tuple(path.token_ids[span.start : span.stop]) == own.token_ids[:number]
            ones[span.start : span.stop] = [1] * number
            if number == span.num_tokens:
                whole.add((span.request_id, span.sample_index))
        assert path.loss_mask == ones
    assert whole == set(samples)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_paths_have_exactly_what_was_rendered_and_sampled(seed: int) -> None:
    turns = conversation(seed)
    tree = TokenTree("s", turns)
    found = tree.samples()
    check_paths(turns, found)
    # A prompt is on a path as far as it agrees with any that is shorter.
    for each in turns:
        assert tree.continues(each) == len(each.prompt)
        shorter = [t for t in turns if len(t.prompt) < len(each.prompt)]
        known = [[*t.prompt, *s.token_ids] for t in shorter for s in t.samples]
        longest = max((matched(each.prompt, other) for other in known), default=0)
        assert TokenTree("s", shorter).continues(each) == longest


def test_the_tree_is_the_same_in_any_order_of_turns() -> None:
    for seed in range(40):
        turns = conversation(seed)[:4]
        expected = TokenTree("s", turns).samples()
        assert all(TokenTree("s", each).samples() == expected for each in permutations(turns))

"""Texts that are written by chance within a grammar."""

from __future__ import annotations

import numpy as np
import torch

from nano_inference.config import BUNDLED_MODEL, Constraint, EngineConfig, SamplingParams
from nano_inference.stages.executor.driver.grammar_masks import GrammarMasks
from nano_inference.stages.executor.driver.sequences import Places, SequenceTable
from nano_inference.text.grammar import GrammarCompiler
from nano_inference.text.tokenizer import load_tokenizer

from ..plans import new_sequence

FOLDER = EngineConfig(model_path=BUNDLED_MODEL).model_folder
# More than the tokenizer has, as of models whose vocabulary is padded.
VOCAB = 800
MOST = 160
PROMPT = (5, 6, 7)


class Writer:
    """Writes texts by chance, within their grammars, as the executor would."""

    def __init__(self) -> None:
        self.compiler = GrammarCompiler(FOLDER, VOCAB)
        self.table = SequenceTable(8, 512, 16)
        self.constraints = GrammarMasks(self.table, self.compiler)
        self.tokenizer = load_tokenizer(FOLDER)
        # Tokens that end a part of a text, so that most texts end.
        closing = {*self.tokenizer.convert_tokens_to_ids(list('"}],'))}
        self.bias = torch.zeros(VOCAB)
        self.bias[sorted(closing)] = 3.0
        self._next = 0

    def add(self, constraint: Constraint, generated: tuple[int, ...] = ()) -> int:
        """Add a sample with some tokens; return its row."""
        self._next += 1
        sampling = SamplingParams(constraint=constraint, max_tokens=MOST)
        tokens = (*PROMPT, *generated)
        self.table.add(new_sequence(self._next, tokens, (), sampling, num_generated=len(generated)))
        return int(self.table.rows_of([self._next])[0])

    def step(self, rows: list[int], generator: torch.Generator) -> list[int]:
        """The next token of each."""
        chosen = np.array(rows)
        masks = self.constraints.begin(Places.next_of(chosen))
        assert masks is not None
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 2 + self.bias
        masks.result(60).apply(logits)
        tokens = logits.argmax(-1).numpy()
        self.table.write_tokens(chosen, self.table.num_known[chosen], tokens)
        self.table.num_known[chosen] += 1
        self.table.num_generated[chosen] += 1
        return [int(token) for token in tokens]

    def write(self, constraint: Constraint, seed: int) -> tuple[str, bool]:
        """A text, and whether it came to its end."""
        row = self.add(constraint)
        generator = torch.Generator().manual_seed(seed)
        token_ids: list[int] = []
        while not self.table.at_limit(np.array([row]))[0]:
            (token,) = self.step([row], generator)
            if token in self.compiler.stop_ids:
                break
            token_ids.append(token)
        ended = token in self.compiler.stop_ids and not self.table.incomplete[row]
        self.table.remove(int(self.table.ids_of(np.array([row]))[0]))
        return self.tokenizer.decode(token_ids, skip_special_tokens=True), ended

    def allowed(
        self, constraint: Constraint, generated: tuple[int, ...] = (), draft: tuple[int, ...] = ()
    ) -> list[set[int]]:
        """The tokens that may come after some, and after each drafted one."""
        row = self.add(constraint, generated)
        known = int(self.table.num_known[row])
        self.table.tokens[row, known : known + len(draft)] = draft
        rows = np.full(1 + len(draft), row)
        masks = self.constraints.begin(Places(rows, np.arange(len(rows))))
        assert masks is not None
        bits = np.unpackbits(masks.result(60).allowed.view(np.uint8), axis=1, bitorder="little")
        self.table.remove(int(self.table.ids_of(np.array([row]))[0]))
        return [set(np.flatnonzero(each).tolist()) for each in bits]

    def takes(self, constraint: Constraint, text: str) -> bool:
        """Whether it could write this text, and end there."""
        matcher = self.compiler.matcher(constraint)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return all(map(matcher.consume_token, token_ids)) and matcher.is_accepting()

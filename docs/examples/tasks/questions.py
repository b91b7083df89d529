"""A task of Inspect's: is the whole answer the right one?"""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def tiny_questions() -> Task:
    return Task(
        dataset=json_dataset("questions.jsonl", FieldSpec(input="question", target="answer")),
        solver=generate(),
        scorer=exact(),
    )

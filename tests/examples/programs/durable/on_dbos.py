"""Three steps on DBOS, with its state in SQLite."""

from dbos import DBOS, SetWorkflowID
from openai import OpenAI
from steps import LONG, PROMPTS, STATE, TOKENS, URL, WORKFLOW, crash_in_the_middle, done

client = OpenAI(base_url=URL, api_key="none")
DBOS(config={"name": "durable", "system_database_url": f"sqlite:///{STATE}/dbos.sqlite"})


@DBOS.step(retries_allowed=True)
def generate(prompt: str) -> str:
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        extra_body=LONG,
        extra_headers={"Idempotency-Key": f"{DBOS.workflow_id}.{DBOS.step_id}"},
    )
    return answer.choices[0].text


@DBOS.workflow()
def workflow() -> list[str]:
    return [generate(prompt) for prompt in PROMPTS]


DBOS.launch()
crash_in_the_middle()
with SetWorkflowID(WORKFLOW):
    # A process that starts again recovers the workflow by itself; this waits for it.
    handle = DBOS.start_workflow(workflow)
done(handle.get_result())

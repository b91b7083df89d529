"""Responses that call tools of MCP servers: rounds of an answer and of calls.

Each round is a request of its own. The record on the bus has the response as it is (`answer`), and
is updated before each call: a call is made once, by the gateway that began the response, and by no
other gateway after it. Imported only where `mcp.servers` or `mcp.server_hosts` is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec
from mcp_types import Tool

from .....bus.public import Completion
from .....config import NanoInferenceError, RequestError, shown
from .....media.addresses import check_url
from ....call import Call
from ....caller import Caller
from ....server.http import EventStream, JsonResponse, Response, SendEvent, connected, field_error
from ....serving.begun_calls import Found, name_of_key, pauses_s
from ....serving.durable_calls import IdempotencyKey
from ....serving.fields import read_part
from ....serving.mcp_servers import Connection, McpServer, Outcome, configured, failed, url_rules
from ....serving.mcp_servers import connected as connected_server
from ....serving.prepared import about_tools
from ....serving.samples import SampleChunks, stream_unsent
from ....serving.services import Services
from ....serving.submissions import in_time
from ..errors import as_openai
from .compaction import Making
from .events import NOTHING
from .items import MCP_CALL, MCP_LIST, MCP_REQUEST, MCP_RESPONSE, Item, answered
from .mcp_output import Pending, RoundsEvents, RoundsOutput, RoundsWriter
from .mcp_tools import McpTool
from .output import UNENDED, Answer
from .requests import ID_PREFIX, ResponseCall, ResponseRecord
from .stored import check_streams
from .tools import MCP, shown_tools

_LONGEST_PAUSE_S = 0.5

_SAVE_S = 5.0
"""Time to keep a response whose client has left."""


class _Wanted(NamedTuple):
    """A server that a call names.

    Attributes:
        tool: As the call gave it.
        server: With its secrets.
        place: The tool's path in the body.
    """

    tool: McpTool
    server: McpServer
    place: str


class _Offered(NamedTuple):
    """A server that is connected, with the tools that the model is offered, by name."""

    tool: McpTool
    connection: Connection
    tools: dict[str, Tool]

    def needs_approval(self, name: str) -> bool:
        return self.tool.needs_approval(name, read_only=_read_only(self.tools[name]))


class _Ended(RequestError):
    """The response was ended or deleted while it was made."""


class ChosenServer(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of an MCP server, or one of them, in a choice."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


async def create(
    services: Services,
    responses: Making,
    call: Call,
    wanted: ResponseCall,
    items: list[Item],
    again: IdempotencyKey | None,
) -> Response:
    """Answer a call of `/v1/responses` with tools of MCP servers.

    Args:
        responses: The endpoints.
        again: The call's identity, if it has a key.
    """
    fields = wanted.fields
    await services.served.check(fields.model, call.caller)
    if fields.background:
        raise field_error(
            "background",
            ": a response with tools of MCP servers ends with its connection, since no other "
            "gateway may make its calls again; leave background out",
            code="unsupported",
        )
    servers = _servers(services, wanted, call.caller)
    urls = {each.tool.server_label: _origin(services, each) for each in servers}
    kept = {each.place: each.tool.shown(urls[each.tool.server_label]) for each in servers}
    tools = [kept.get(f"tools[{place}]", tool) for place, tool in enumerate(fields.tools)]
    # From here on no record, log or error has the secrets.
    wanted = msgspec.structs.replace(wanted, fields=msgspec.structs.replace(fields, tools=tools))
    whole = await responses.whole(call, wanted, items)
    call.session = await responses.stored.session_of(call, wanted)
    call.begin(fields.budget_ms, fields.model)
    record = msgspec.structs.replace(
        whole, deadline_ns=call.deadline_ns, caller=call.caller, keyed=again, session=call.session
    )
    run = _Run(services, responses, call, record, servers)
    if fields.stream:
        return run.streamed()

    async def nothing(data: bytes, event_id: str = "", *, name: str = "") -> None:
        """Send nothing: the answer comes whole."""

    async with connected(call.cancelled):
        return JsonResponse(await run.answer(nothing))


def _servers(services: Services, wanted: ResponseCall, caller: Caller) -> list[_Wanted]:
    """Read the servers of a call.

    Raises:
        FieldError: One is unknown, or named twice.
        RequestError: A URL is not allowed, or the caller's key may not use a server.
    """
    config = services.config.mcp
    known = configured(config)
    found: dict[str, _Wanted] = {}
    for number, each in enumerate(wanted.fields.tools):
        if each.get("type") != MCP:
            continue
        place = f"tools[{number}]"
        tool = read_part(each, McpTool, place)
        label, headers = tool.server_label, dict(tool.headers or {})
        if label in found:
            raise field_error(
                f"{place}.server_label",
                f"{shown(label)} is named twice",
                remedy="name each server once",
            )
        if tool.authorization:
            headers["Authorization"] = f"Bearer {tool.authorization}"
        if tool.server_url is not None:
            check_url(tool.server_url, url_rules(config), f"{place}.server_url")
            _check_allowed(caller, urlsplit(tool.server_url).hostname or "", place)
            server = McpServer(url=tool.server_url, headers=headers)
        elif caller.mcp_servers is not None and label not in caller.mcp_servers:
            # As an unknown one below: its name is not this caller's to know.
            raise _no_server(label, place)
        elif label not in known:
            raise _no_server(label, place)
        elif headers:
            raise field_error(
                place, ": headers and authorization are for a server_url; leave them out"
            )
        else:
            server = known[label]
        found[label] = _Wanted(tool, server, place)
    return list(found.values())


def _no_server(label: str, place: str) -> RequestError:
    return field_error(
        f"{place}.server_label",
        f": the gateway has no server {shown(label)} for this key (mcp.servers); name one that it "
        "has, or give server_url",
    )


def _check_allowed(caller: Caller, host: str, place: str) -> None:
    """Raise RequestError (insufficient_scope) if a caller may not use servers of a host."""
    if caller.mcp_servers is not None and host not in caller.mcp_servers:
        raise RequestError(
            f"{place}.server_url: this key may not use MCP servers on {shown(host)}; name one that "
            "it may use, or have the key changed (`admin keys change --allow-mcp-server`)",
            code="insufficient_scope",
        )


def _origin(services: Services, wanted: _Wanted) -> str | None:
    """Return a server's URL without its path."""
    if wanted.tool.server_url is None:
        return None
    rules = url_rules(services.config.mcp)
    target = check_url(wanted.server.url, rules, f"{wanted.place}.server_url")
    return target._replace(path="").url


@dataclass(eq=False)
class _Run:
    """One response.

    Attributes:
        record: Without prompt, as it is kept.
        num_calls: Calls that were made.
    """

    services: Services
    responses: Making
    call: Call
    record: ResponseRecord
    servers: list[_Wanted]
    num_calls: int = 0

    def __post_init__(self) -> None:
        self._offered: dict[str, _Offered] = {}
        self._sent: RoundsEvents | None = None
        self._output = RoundsOutput(frozenset(each.tool.server_label for each in self.servers))

    def streamed(self) -> EventStream:
        async def produce(send: SendEvent) -> None:
            try:
                await self.answer(send)
            except NanoInferenceError as error:
                if not stream.committed:
                    raise as_openai(error, "responses") from None
                events = self._sent or self._begin(send, await self._writer(self.record))
                await events.fail(error)

        stream = EventStream(produce, self.services.config.gateway.comment_s, ids=False)
        return stream

    async def answer(self, send: SendEvent) -> Answer:
        """Make the response, and send its events.

        Raises:
            NanoInferenceError: There is no response, and no tool was called.
        """
        async with AsyncExitStack() as stack:
            await self._connect(stack)
            approvals = list(self._approvals())
            first = await self._prepared(0)
            writer = await self._writer(first)
            if self.record.keyed is not None:
                record = self._with(writer.begun("in_progress"))
                record, found = await self.responses.stored.claim(self.call, record)
                if found is not None:
                    if self.record.call.fields.stream:
                        check_streams(found.record)
                    return await self._known(found)
                self.record = record
            return await self._kept(first, approvals, self._begin(send, writer), writer)

    # --- its beginning ------------------------------------------------------------------------

    async def _connect(self, stack: AsyncExitStack) -> None:
        """Connect to the servers, and list their tools."""
        config, num_tools = self.services.config.mcp, 0
        for tool, server, place in self.servers:
            label = tool.server_label
            rules = None if tool.server_url is None else url_rules(config)
            connection = await stack.enter_async_context(
                connected_server(label, server, config, rules)
            )
            tools = {
                each.name: each
                for each in await connection.tools()
                if tool.allows(each.name, read_only=_read_only(each))
            }
            num_tools += len(tools)
            if num_tools > config.max_tools:
                raise field_error(
                    f"{place}.allowed_tools",
                    f": the servers have more than {config.max_tools} tools (mcp.max_tools); "
                    "name fewer",
                )
            self._offered[label] = _Offered(tool, connection, tools)

    def _approvals(self) -> Iterator[Pending]:
        """Yield the calls that the input approves or refuses.

        Raises:
            RequestError: An approval is of no call that waits.
        """
        items, first = self.record.items, self.record.num_before
        requests = {item["id"]: item for item in items if item["type"] == MCP_REQUEST}
        for place, item in enumerate(items[first:]):
            if item["type"] != MCP_RESPONSE:
                continue
            where, approval = f"input[{place}].approval_request_id", item["approval_request_id"]
            request = requests.get(approval)
            if request is None:
                raise field_error(
                    where,
                    f": there is no request {shown(approval)} before it; send that as well, or "
                    "previous_response_id",
                )
            label, name = request["server_label"], request["name"]
            if label not in self._offered or name not in self._offered[label].tools:
                raise field_error(
                    where, f": {shown(label)} with {shown(name)} is not among the call's tools"
                )
            refusal = None if item["approve"] else f"not approved. {item['reason'] or ''}".strip()
            if any(
                each["type"] == MCP_CALL and each["approval_request_id"] == approval
                for each in items
            ):
                raise _used(approval)
            yield Pending(label, name, request["arguments"], approval, refusal)

    async def _claim(self, approvals: Iterable[Pending]) -> None:
        """Claim approvals, which are good for one call each."""
        calls = self.services.client.bus.store.calls
        for each in approvals:
            if each.approval is None or each.refusal is not None:
                continue
            name = name_of_key(self.record.tenant, f"mcp approval {each.approval}")
            if await calls.claim(name, self.record.id) != self.record.id:
                raise _used(each.approval)

    async def _known(self, found: Found[ResponseRecord]) -> Answer:
        """Return the response that was begun with the call's key, once it has ended."""
        for pause_s in pauses_s(_LONGEST_PAUSE_S):
            answer = await self.responses.stored.known(found)
            if answer["status"] not in UNENDED:
                break
            await anyio.sleep(pause_s)
            found = await self.responses.stored.look(found.record.id, found.record.tenant)
        return answer

    # --- rounds -------------------------------------------------------------------------------

    def _round(self, number: int) -> ResponseRecord:
        """Return the record of a round, without its prompt."""
        fields = self.record.call.fields
        tools = [self._namespace(tool) if tool["type"] == MCP else tool for tool in fields.tools]
        most = self.services.config.mcp.max_rounds
        fields = msgspec.structs.replace(
            fields,
            tools=[tool for tool in tools if tool is not None],
            tool_choice="none" if number >= most or self._is_full else self._choice(number),
        )
        return msgspec.structs.replace(
            self.record,
            call=msgspec.structs.replace(self.record.call, fields=fields),
            items=[*self.record.items, *answered(self._output.blocks)],
        )

    def _namespace(self, tool: dict[str, Any]) -> dict[str, Any] | None:
        """Return a server's tools as functions; None if there are none."""
        label = tool["server_label"]
        functions = [
            {
                "type": "function",
                "name": each.name,
                "description": each.description,
                "parameters": each.input_schema,
            }
            for each in self._offered[label].tools.values()
        ]
        space = {"type": "namespace", "name": label, "description": tool["server_description"]}
        return space | {"tools": functions} if functions else None

    def _choice(self, number: int) -> str | dict[str, Any] | None:
        """Return the choice of tools in a round: one that requires a call does so in the first."""
        choice = self.record.call.fields.tool_choice
        if not isinstance(choice, dict):
            return "auto" if number and choice == "required" else choice
        if choice.get("type") == MCP:
            choice = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
        if choice.get("type") != "allowed_tools":
            return "auto" if number and choice.get("type") != "none" else choice
        chosen: list[Any] = []
        for place, each in enumerate(choice.get("tools") or ()):
            if isinstance(each, dict) and each.get("type") == MCP:
                named = read_part(each, ChosenServer, f"tool_choice.tools[{place}]")
                chosen += self._named(named)
            else:
                chosen.append(each)
        return choice | {"tools": chosen} | ({"mode": "auto"} if number else {})

    def _named(self, chosen: ChosenServer) -> list[dict[str, Any]]:
        """Return the functions of a server in a choice."""
        offered = self._offered.get(chosen.server_label)
        if offered is None:
            raise field_error(
                "tool_choice",
                f": there is no server {shown(chosen.server_label)} among the call's tools",
                remedy="add it, or name another",
            )
        names = list(offered.tools) if chosen.name is None else [chosen.name]
        space = {"type": "function", "namespace": chosen.server_label}
        return [space | {"name": name} for name in names]

    @property
    def _is_full(self) -> bool:
        """Whether the response may make no more calls."""
        most = self.record.call.fields.max_tool_calls
        return most is not None and self.num_calls >= most

    async def _prepared(self, number: int) -> ResponseRecord:
        """Return the record of a round, checked."""
        record = await self.responses.prepared(self.call, self._round(number))
        await self.responses.check(record)
        return record

    async def _kept(
        self,
        first: ResponseRecord,
        approvals: list[Pending],
        events: RoundsEvents,
        writer: RoundsWriter,
    ) -> Answer:
        """Make the response while the bus keeps it."""
        self.record = self._with(writer.begun("in_progress"))
        failure: NanoInferenceError | None = None
        async with self.services.durable.begun(self.record) as attachment:
            try:
                await self._claim(approvals)
                answer = await self._rounds(first, approvals, events, writer)
            except _Ended:
                answer = writer.begun("cancelled")
            except NanoInferenceError as error:
                if not self.num_calls:
                    raise
                # The calls that were made are shown.
                failure, answer = error, writer.failed(error)
            except BaseException:
                with anyio.move_on_after(_SAVE_S, shield=True):
                    await self._keep(writer.begun("cancelled"))
                    if attachment is not None:
                        attachment.end()
                raise
            await self._keep(answer)
            if attachment is not None:
                attachment.end()
        await (events.finish(answer) if failure is None else events.fail(failure))
        return answer

    async def _rounds(
        self,
        record: ResponseRecord,
        approvals: list[Pending],
        events: RoundsEvents,
        writer: RoundsWriter,
    ) -> Answer:
        await self._list(events)
        await self._make(approvals, events, writer)
        number, output = 0, self._output
        while True:
            await self._check_wanted()
            if number or approvals:
                record = await self._prepared(number)
            writer.record, begun = record, len(output.blocks)
            events.next_round()
            completion = await self._generated(record, number, events)
            await events.rest(completion)
            answer = writer.ended(completion, events.items)
            waits = any(
                each["type"] in ("function_call", "custom_tool_call")
                for each in output.blocks[begun:]
            )
            cut = None if answer["status"] == "completed" else "the answer was cut; not called"
            calls = [each._replace(refusal=cut) for each in output.calls]
            for asks, group in groupby(calls, self._asks):
                if asks:
                    waits = True
                    for each in group:
                        await self._ask(each, events)
                else:
                    await self._make([*group], events, writer)
            if cut is not None or waits or not output.calls:
                return answer | {"output": [*output.blocks]}
            number += 1

    async def _generated(
        self, record: ResponseRecord, number: int, events: RoundsEvents
    ) -> Completion:
        submissions, call = self.services.submissions, self.call
        asked = record.request(self.services.config)
        if number:
            asked = msgspec.structs.replace(asked, request_id=f"{asked.request_id}-{number}")
        with about_tools(record.reading):
            if asked.stream:
                return await stream_unsent(submissions, call, asked, SampleChunks(events.add))
            return (await submissions.run(call, [asked]))[0]

    # --- items of servers ---------------------------------------------------------------------

    async def _list(self, events: RoundsEvents) -> None:
        """Add the lists of tools that the conversation doesn't have."""
        known = {item["server_label"] for item in self.record.items if item["type"] == MCP_LIST}
        for label, (_, _, tools) in self._offered.items():
            if label in known:
                continue
            item = self._item("mcpl_", MCP_LIST, server_label=label, error=None, tools=[])
            await events.item("added", item)
            await events.about("mcp_list_tools.in_progress", item)
            await events.about("mcp_list_tools.completed", item)
            item["tools"] = [_listed(each) for each in tools.values()]
            await self._done(item, events)

    def _asks(self, pending: Pending) -> bool:
        return pending.refusal is None and self._offered[pending.label].needs_approval(pending.name)

    async def _ask(self, pending: Pending, events: RoundsEvents) -> None:
        """Add a request to approve a call."""
        label, name, arguments = pending[:3]
        item = self._item("mcpr_", MCP_REQUEST, server_label=label, name=name, arguments=arguments)
        await events.item("added", item)
        await self._done(item, events)

    async def _make(
        self, calls: Sequence[Pending], events: RoundsEvents, writer: RoundsWriter
    ) -> None:
        """Make calls, some at once, and add them with their results, in their order."""
        items: list[Answer] = []
        outcomes: dict[int, Outcome] = {}
        left = self.record.call.fields.max_tool_calls
        left = len(calls) if left is None else left - self.num_calls
        for place, pending in enumerate(calls):
            items.append(await self._begun(pending, place, events))
            left -= pending.refusal is None
            if pending.refusal is not None:
                outcomes[place] = failed(pending.refusal)
            elif left < 0:
                outcomes[place] = failed("not called: the response has made max_tool_calls calls")
        if made := [place for place in range(len(calls)) if place not in outcomes]:
            await self._check_wanted()
            begun = writer.begun("in_progress")
            await self._keep(begun | {"output": [*begun["output"], *items]})
            self.num_calls += len(made)
        try:
            with in_time(self.call):
                await self._run([(place, calls[place]) for place in made], outcomes)
        except BaseException:
            for place, item in enumerate(items):
                ended = _ended(outcomes[place]) if place in outcomes else {"status": "incomplete"}
                self._output.blocks.append(item | ended)
            raise
        for place, item in enumerate(items):
            item |= _ended(outcomes[place])
            await events.about(f"mcp_call.{item['status']}", item)
            await self._done(item, events)

    async def _begun(self, pending: Pending, place: int, events: RoundsEvents) -> Answer:
        """Return the item of a call that begins, after `place` others."""
        item = self._item(
            "mcp_",
            MCP_CALL,
            status="in_progress",
            server_label=pending.label,
            name=pending.name,
            arguments="",
            approval_request_id=pending.approval,
            output=None,
            error=None,
        )
        await events.item("added", item, place)
        item["arguments"] = arguments = pending.arguments
        await events.about("mcp_call_arguments.delta", item, place, delta=arguments)
        await events.about("mcp_call_arguments.done", item, place, arguments=arguments)
        await events.about("mcp_call.in_progress", item, place)
        return item

    async def _run(
        self, calls: Sequence[tuple[int, Pending]], outcomes: dict[int, Outcome]
    ) -> None:
        """Run calls at once, as many as `mcp.max_calls`."""
        limit = anyio.CapacityLimiter(self.services.config.mcp.max_calls)

        async def run(place: int, pending: Pending) -> None:
            async with limit:
                connection = self._offered[pending.label].connection
                outcomes[place] = await connection.call(pending.name, pending.arguments)

        async with anyio.create_task_group() as group:
            for place, pending in calls:
                group.start_soon(run, place, pending)

    def _item(self, prefix: str, kind: str, **fields: Any) -> Answer:
        number = self._output.numbers[kind]
        self._output.numbers[kind] += 1
        item_id = f"{prefix}{self.record.id.removeprefix(ID_PREFIX)}"
        return {"id": f"{item_id}_{number}" if number else item_id, "type": kind} | fields

    async def _done(self, item: Answer, events: RoundsEvents) -> None:
        await events.item("done", item)
        self._output.blocks.append(item)

    # --- its record ---------------------------------------------------------------------------

    def _with(self, answer: Answer) -> ResponseRecord:
        return msgspec.structs.replace(self.record, answer=answer)

    async def _check_wanted(self) -> None:
        """Raises _Ended: The response was ended or deleted."""
        if self.record.is_durable:
            kept = await self.services.durable.find(self.record.id)
            if kept is None or not kept.record or "cancelled" in kept.marks:
                raise _Ended("the response was ended", code="aborted")

    async def _keep(self, answer: Answer) -> None:
        """Update the record, unless the response was deleted."""
        if not self.record.is_durable:
            return
        kept = await self.services.durable.find(self.record.id)
        if kept is not None and kept.record:
            await self.services.durable.replace(self.record.id, self._with(answer).encode())

    async def _writer(self, record: ResponseRecord) -> RoundsWriter:
        services, fields = self.services, self.record.call.fields
        return RoundsWriter(
            record,
            await services.tokenizer.required(),
            await services.tokenizer.message_format(),
            services.measures,
            output=self._output,
            fields={
                "tools": shown_tools(fields.tools),
                "tool_choice": fields.tool_choice or "auto",
                "max_tool_calls": fields.max_tool_calls,
            },
        )

    def _begin(self, send: SendEvent, writer: RoundsWriter) -> RoundsEvents:
        conversations = self.responses.stored.conversations

        async def keep(record: ResponseRecord, answer: Answer) -> None:
            # The items of a round have its output.
            await conversations.add_response(self.record, answer)

        self._sent = RoundsEvents(writer, send, self.responses.stored.beside, keep, NOTHING)
        return self._sent


def _read_only(tool: Tool) -> bool:
    """Return whether a server declares that its tool changes nothing."""
    return tool.annotations is not None and bool(tool.annotations.read_only_hint)


def _listed(tool: Tool) -> Answer:
    annotations = tool.annotations
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": annotations and annotations.model_dump(by_alias=True, exclude_none=True),
    }


def _ended(outcome: Outcome) -> Answer:
    """Return the fields of a call that has ended."""
    if outcome.error is None:
        return {"status": "completed", "output": outcome.text}
    return {"status": "failed", "error": outcome.error}


def _used(approval: str) -> RequestError:
    return RequestError(
        f"the approval of {shown(approval)} was used before: its call is made once; continue the "
        "response that made it, or begin anew",
        code="mcp_approval_used",
    )

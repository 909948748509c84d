"""Random clients with their habits talk, and the session tree must know who follows whom.

The model knows the truth because it is the client: every conversation is a list of (user words, answer, turn), and a
request is a rendering of it through the habits of that client.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from schemas.events.base import Message
from services.gateway.placing import Placed
from tests.fixtures.conversations import assistant, call, tool, user
from tests.fixtures.turn_tree import TurnTree, is_side

SHORT_ANSWERS = ["Done.", "OK", "Hello!"]


@dataclass(frozen=True)
class Exchange:
    asked: tuple[Message, ...]
    """User words, or tool results."""
    answer: Message
    placed: Placed


@dataclass(frozen=True)
class Habits:
    """What a client does to a conversation when it sends it."""

    volatile_context: bool
    time_stamps: bool
    cuts_reasoning: bool
    rewrites_tool_calls: bool
    trims_answers: bool

    def render(self, history: list[Exchange], asked: tuple[Message, ...], clock: int) -> list[Message]:
        system: Message = {"role": "system", "content": f"running inside OpenClaw, day {clock}"}
        messages = [system]
        for exchange in history:
            messages += [self._asked(message) for message in exchange.asked]
            messages.append(self._echo(exchange.answer))
        messages += [self._asked(message) for message in asked]
        if self.volatile_context:
            context = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>{clock}<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
            messages.append({"role": "user", "content": [{"type": "text", "text": context}]})
        return messages

    def _asked(self, message: Message) -> Message:
        if message["role"] != "user" or not self.time_stamps:
            return message
        return {**message, "content": f"[Sun 2026-11-29 15:01 UTC] {message['content']}"}

    def _echo(self, answer: Message) -> Message:
        echo = dict(answer)
        if isinstance(echo["content"], str):
            text = echo["content"]
            if self.cuts_reasoning:
                text = text.split("</think>")[-1]
            echo["content"] = text.strip() if self.trims_answers else text
        calls = echo.get("tool_calls")
        if isinstance(calls, list) and self.rewrites_tool_calls:
            echo = {**call("run", '{"b":1,"a":"x"}', "rewritten"), "content": ""}
        return echo


@dataclass
class Conversation:
    habits: Habits
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    last_request: list[Message] | None = None


HABITS = st.builds(Habits, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())


class ClientsAgainstTree(RuleBasedStateMachine):
    """Every check is: the parent that the tree found is the turn that the client really continued."""

    @initialize()
    def begin(self) -> None:
        self.tree = TurnTree()
        self.conversations: list[Conversation] = []
        self.count = 0
        self.evidence: dict[str, set[str]] = {}

    @rule(habits=HABITS)
    def new_conversation(self, habits: Habits) -> None:
        self.conversations.append(Conversation(habits))

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), short=st.booleans(), thinks=st.booleans())
    def talk(self, data: st.DataObject, short: bool, thinks: bool) -> None:
        conversation = self._choose(data)
        said = (
            data.draw(st.sampled_from(SHORT_ANSWERS)) if short else f"a long answer of its own, number {self._next()}"
        )
        answer = assistant(f"<think>hm {self._next()}</think>\n\n{said}" if thinks else f"{said}\n")
        self._ask(conversation, (user(f"words of the user {self._next()}"),), answer)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data())
    def use_a_tool(self, data: st.DataObject) -> None:
        conversation = self._choose(data)
        self._ask(conversation, (user(f"run it {self._next()}"),), call("run", '{"a": "x", "b": 1.0}', "call_9"))
        self._ask(
            conversation, (tool(f"result {self._next()}", "call_9"),), assistant(f"it gave a result {self._next()}")
        )

    @precondition(lambda self: any(conversation.exchanges for conversation in self.conversations))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """The last answer never arrived: the same request again, and the new answer counts."""
        conversation = self._choose(data, used=True)
        lost = conversation.exchanges.pop()
        before = len(self.tree.next_states)
        self._ask(conversation, lost.asked, assistant(f"another answer to the same question {self._next()}"))
        assert len(self.tree.next_states) == before, "a repeated request made another next state"

    @precondition(lambda self: any(conversation.exchanges for conversation in self.conversations))
    @rule(data=st.data())
    def rewind_and_edit(self, data: st.DataObject) -> None:
        conversation = self._choose(data, used=True)
        keep = data.draw(st.integers(0, len(conversation.exchanges) - 1))
        if keep and conversation.exchanges[keep].asked[0]["role"] == "tool":
            keep -= 1  # Users edit their own messages, not the tools'.
        del conversation.exchanges[keep:]
        answer = assistant(f"an answer to the edited words {self._next()}")
        self._ask(conversation, (user(f"edited words {self._next()}"),), answer)

    @precondition(lambda self: any(conversation.exchanges for conversation in self.conversations))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        conversation = self._choose(data, used=True)
        self.conversations.append(Conversation(conversation.habits, list(conversation.exchanges)))

    @precondition(lambda self: any(conversation.exchanges for conversation in self.conversations))
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        """A poll that the client keeps out of the history afterwards."""
        conversation = self._choose(data, used=True)
        poll = user("Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.")
        messages = conversation.habits.render(conversation.exchanges, (poll,), self._next())
        before = len(self.tree.next_states)
        assert is_side(self.tree.answer(messages, "HEARTBEAT_OK"))
        assert len(self.tree.next_states) == before

    def _ask(self, conversation: Conversation, asked: tuple[Message, ...], answer: Message) -> None:
        messages = conversation.habits.render(conversation.exchanges, asked, self._next())
        placed = self.tree.answer(messages, answer)
        parent = conversation.exchanges[-1].placed if conversation.exchanges else None
        assert not is_side(placed)
        if parent is None:
            assert placed.parent_turn_id is None
        else:
            assert placed.parent_turn_id == parent.turn_id
            assert placed.session_id == parent.session_id
            assert placed.depth == parent.depth + 1
            assert list(asked) in self.tree.followed(parent)
        conversation.exchanges.append(Exchange(asked, answer, placed))

    def _choose(self, data: st.DataObject, *, used: bool = False) -> Conversation:
        return data.draw(
            st.sampled_from([one for one in self.conversations if one.exchanges or not used]).map(lambda one: one)
        )

    def _next(self) -> int:
        self.count += 1
        return self.count


TestClientsAgainstTree = ClientsAgainstTree.TestCase
TestClientsAgainstTree.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

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
from tests.fixtures.conversations import assistant, call, system, tool, user
from tests.fixtures.turn_tree import TurnTree, is_side

SHORT_ANSWERS = ["Done.", "OK", "Hello!"]
FLUSH = user("Pre-compaction memory flush. Store durable memories only in memory/2026-05-01.md.")
POLL = user("Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.")
SUMMARY = "The conversation history before this point was compacted into the following summary:"
REPAIRED = "[openclaw] missing tool result in session history; inserted synthetic error result"
WRAPPER = "[Queued user message from a previous active turn; preserved as context only. Continue below.]\n"
STAMP = "[Sun 2026-11-29 15:01 UTC] "


@dataclass(frozen=True)
class Exchange:
    asked: tuple[Message, ...]
    """User words, or tool results."""
    answer: Message
    placed: Placed


def evidence_of(asked: tuple[Message, ...]) -> list[Message]:
    return [message for message in asked if message["content"] != REPAIRED]


@dataclass(frozen=True)
class Habits:
    """What a client does to a conversation when it sends it."""

    volatile_context: bool
    time_stamps: bool
    cuts_reasoning: bool
    rewrites_tool_calls: bool
    trims_answers: bool
    keeps_machinery: bool
    """Memory flushes stay in the history."""
    invents_answers: bool
    """An assistant message of the client's own stands first."""

    def render(self, conversation: "Conversation", asked: tuple[Message, ...], clock: int) -> list[Message]:
        messages = [system(f"running inside OpenClaw, day {clock}")]
        if self.invents_answers:
            messages += [user("Here is the workspace."), assistant("Thank you, I have read it.")]
        start = conversation.compacted
        if start:
            messages += [user(f"{SUMMARY} {clock}"), self._echo(conversation.exchanges[start - 1].answer)]
        for number, exchange in enumerate(conversation.exchanges[start:], start):
            messages += conversation.machinery.get(number, [])
            messages += [self._asked(message) for message in exchange.asked]
            messages.append(self._echo(exchange.answer))
        messages += conversation.machinery.get(len(conversation.exchanges), [])
        messages += [self._asked(message) for message in asked]
        if self.volatile_context:
            context = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>{clock}<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
            messages.append({"role": "user", "content": [{"type": "text", "text": context}]})
        return messages

    def _asked(self, message: Message) -> Message:
        if message["role"] != "user" or not self.time_stamps or WRAPPER in str(message["content"]):
            return message
        return {**message, "content": f"{STAMP}{message['content']}"}

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
    principal: str
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    compacted: int = 0
    """So many exchanges are a summary now; of the last of them the answer was kept."""
    machinery: dict[int, list[Message]] = field(default_factory=dict[int, list[Message]])
    """What the client itself put into the history, by the number of exchanges before it."""

    def cut_back_to(self, exchanges: int) -> None:
        """Forgets everything after so many exchanges. The history before a compaction comes back with them."""
        del self.exchanges[exchanges:]
        self.machinery = {number: said for number, said in self.machinery.items() if number <= exchanges}
        if self.compacted > exchanges:
            self.compacted = 0

    def fork(self) -> "Conversation":
        return Conversation(self.habits, self.principal, list(self.exchanges), self.compacted, dict(self.machinery))

    @property
    def ends_distinctively(self) -> bool:
        """Whether its newest answer alone identifies it."""
        return bool(self.exchanges) and "which nobody could take for another" in str(self.exchanges[-1].answer)


HABITS = st.builds(Habits, *[st.booleans()] * 7)
WITH_HISTORY = precondition(lambda self: any(conversation.exchanges for conversation in self.conversations))


class ClientsAgainstTree(RuleBasedStateMachine):
    """Every check is: the parent that the tree found is the turn that the client really continued."""

    @initialize()
    def begin(self) -> None:
        self.tree = TurnTree()
        self.conversations: list[Conversation] = []
        self.count = 0

    @rule(habits=HABITS, principal=st.sampled_from(["alice", "bob"]))
    def new_conversation(self, habits: Habits, principal: str) -> None:
        self.conversations.append(Conversation(habits, principal))

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), short=st.booleans(), thinks=st.booleans())
    def talk(self, data: st.DataObject, short: bool, thinks: bool) -> None:
        conversation = self._choose(data)
        said = data.draw(st.sampled_from(SHORT_ANSWERS)) if short else self._long()
        answer = assistant(f"<think>hm {self._next()}</think>\n\n{said}" if thinks else f"{said}\n")
        self._ask(conversation, (user(f"words of the user {self._next()}"),), answer)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), lost=st.booleans())
    def use_a_tool(self, data: st.DataObject, lost: bool) -> None:
        """`lost`: the client has no result any more and invents one."""
        conversation = self._choose(data)
        self._ask(conversation, (user(f"run it {self._next()}"),), call("run", '{"a": "x", "b": 1.0}', "call_9"))
        result = REPAIRED if lost else f"result {self._next()}"
        self._ask(conversation, (tool(result, "call_9"),), assistant(self._long()))

    @WITH_HISTORY
    @rule(data=st.data(), wrapped=st.booleans())
    def retry(self, data: st.DataObject, wrapped: bool) -> None:
        """The last answer never arrived: the same request again, perhaps in other words, and the new answer counts."""
        conversation = self._choose(data, used=True)
        lost = conversation.exchanges[-1]
        conversation.cut_back_to(len(conversation.exchanges) - 1)
        before = len(self.tree.next_states)
        sent = lost.asked
        if wrapped and sent[-1]["role"] == "user":
            words = f"{STAMP}{sent[-1]['content']}"
            sent = (*sent[:-1], user(f"{WRAPPER}{words}\n\n{words}"))
        self._ask(conversation, lost.asked, assistant(self._long()), sent=sent)
        assert len(self.tree.next_states) == before, "a repeated request made another next state"

    @WITH_HISTORY
    @rule(data=st.data(), copies=st.integers(1, 3))
    def send_twice(self, data: st.DataObject, copies: int) -> None:
        """The same request several times at once; the client goes on with one of the answers."""
        conversation = self._choose(data, used=True)
        asked = (user(f"impatient words {self._next()}"),)
        messages = conversation.habits.render(conversation, asked, self._next())
        for _ in range(copies):
            self.tree.answer(messages, self._long(), principal=conversation.principal, recorded=False)
        before = len(self.tree.next_states)
        self._ask(conversation, asked, assistant(self._long()))
        assert len(self.tree.next_states) == before, "one of several equal requests made another next state"

    @WITH_HISTORY
    @rule(data=st.data())
    def drop_the_answer(self, data: st.DataObject) -> None:
        """The client forgets an answer and keeps what it had asked."""
        conversation = self._choose(data, used=True)
        dropped = conversation.exchanges[-1]
        conversation.cut_back_to(len(conversation.exchanges) - 1)
        before = self.tree.followed(dropped.placed)  # a fork may have gone on from it
        self._ask(conversation, (*dropped.asked, user(f"once more {self._next()}")), assistant(self._long()))
        assert self.tree.followed(dropped.placed) == before

    @WITH_HISTORY
    @rule(data=st.data())
    def rewind_and_edit(self, data: st.DataObject) -> None:
        conversation = self._choose(data, used=True)
        keep = data.draw(st.integers(0, len(conversation.exchanges) - 1))
        if keep and conversation.exchanges[keep].asked[0]["role"] == "tool":
            keep -= 1  # Users edit their own messages, not the tools'.
        conversation.cut_back_to(keep)
        self._ask(conversation, (user(f"edited words {self._next()}"),), assistant(self._long()))

    @WITH_HISTORY
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.conversations.append(self._choose(data, used=True).fork())

    @precondition(lambda self: any(conversation.ends_distinctively for conversation in self.conversations))
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """A memory flush, a summary, and from then on the summary and the newest answer stand for the history."""
        conversation = data.draw(st.sampled_from([one for one in self.conversations if one.ends_distinctively]))
        self._flush(conversation)
        summariser = system("You are a context summarization assistant.")
        self._side([summariser, user(f"<conversation> {self._next()} </conversation>")], conversation, "a summary")
        conversation.compacted = len(conversation.exchanges)
        conversation.machinery.pop(conversation.compacted, None)

    @WITH_HISTORY
    @rule(data=st.data())
    def flush_memories(self, data: st.DataObject) -> None:
        self._flush(self._choose(data, used=True))

    @WITH_HISTORY
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        """A poll that the client keeps out of the history afterwards."""
        conversation = self._choose(data, used=True)
        self._side(conversation.habits.render(conversation, (POLL,), self._next()), conversation, "HEARTBEAT_OK")

    @WITH_HISTORY
    @rule(data=st.data())
    def ask_for_a_title(self, data: st.DataObject) -> None:
        conversation = self._choose(data, used=True)
        generator = system("You are a title generator. You output ONLY a thread title.")
        self._side([generator, *conversation.exchanges[0].asked[:1]], conversation, "Cities")

    @WITH_HISTORY
    @rule(data=st.data())
    def start_a_sub_agent(self, data: st.DataObject) -> None:
        """A conversation of its own, whatever its words have in common with the parent's."""
        parent = self._choose(data, used=True)
        child = Conversation(parent.habits, parent.principal)
        self._ask(child, parent.exchanges[0].asked, assistant(self._long()))
        assert child.exchanges[0].placed.session_id != parent.exchanges[-1].placed.session_id
        self.conversations.append(child)

    def _flush(self, conversation: Conversation) -> None:
        write = call("write", '{"path": "memory/2026-05-01.md"}')
        self._side(conversation.habits.render(conversation, (FLUSH,), self._next()), conversation, write)
        more = (FLUSH, write, tool("written"))
        self._side(conversation.habits.render(conversation, more, self._next()), conversation, "NO_REPLY")
        if conversation.habits.keeps_machinery:
            said = [*conversation.machinery.get(len(conversation.exchanges), []), *more, assistant("NO_REPLY")]
            conversation.machinery[len(conversation.exchanges)] = said

    def _side(self, messages: list[Message], conversation: Conversation, reply: str | Message) -> None:
        before = len(self.tree.next_states)
        assert is_side(self.tree.answer(messages, reply, principal=conversation.principal))
        assert len(self.tree.next_states) == before, "a side call made a next state"

    def _ask(
        self,
        conversation: Conversation,
        asked: tuple[Message, ...],
        answer: Message,
        *,
        sent: tuple[Message, ...] | None = None,
    ) -> None:
        """`sent` stands in the request where `asked` is meant."""
        messages = conversation.habits.render(conversation, asked if sent is None else sent, self._next())
        before = len(self.tree.next_states)
        placed = self.tree.answer(messages, answer, principal=conversation.principal)
        parent = conversation.exchanges[-1].placed if conversation.exchanges else None
        assert not is_side(placed)
        if parent is None:
            assert placed.parent_turn_id is None
        else:
            assert placed.parent_turn_id == parent.turn_id
            assert placed.session_id == parent.session_id
            assert placed.depth == parent.depth + 1
            expected = evidence_of(asked)
            if expected:
                assert expected in self.tree.followed(parent)
            else:
                assert len(self.tree.next_states) == before, "what the client invented is no evidence"
        conversation.exchanges.append(Exchange(asked, answer, placed))

    def _choose(self, data: st.DataObject, *, used: bool = False) -> Conversation:
        return data.draw(st.sampled_from([one for one in self.conversations if one.exchanges or not used]))

    def _long(self) -> str:
        return f"a long answer, which nobody could take for another, number {self._next()}"

    def _next(self) -> int:
        self.count += 1
        return self.count


TestClientsAgainstTree = ClientsAgainstTree.TestCase
TestClientsAgainstTree.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

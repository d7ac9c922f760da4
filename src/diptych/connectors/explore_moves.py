"""What can happen to one hand-off, edge by edge, and the invariants that every edge is held to.

The network is a set: any message in it may arrive next. Arriving twice, being lost, and all other
bad luck count as faults, of which a world has a number left. A repeat is free once neither the
message nor its answer is under way any more (timers are longer than a round trip; a repeat that
comes too early is an arrival that happens twice). Messages that by the rules can have no effect any
more, whatever follows, are taken out at once. What the machines cannot know (are the bytes right,
does a given-up read still write) is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from diptych.connectors.explore_idle import IdleMessages
from diptych.connectors.explore_world import (
    DMA_TARGET,
    LEAK,
    NEVER_WAITS,
    ONE_END,
    POSITIONS,
    VALID_KV,
    Edge,
    Violation,
    World,
)
from diptych.connectors.handoff import (
    ANNOUNCEMENTS,
    DECODE_ENDS,
    PREFILL_ENDS,
    Event,
    Rules,
    State,
)
from diptych.connectors.handoff_decode import step_decode
from diptych.connectors.handoff_machines import (
    DECODE,
    PREFILL,
    TICKETS,
    Decode,
    Message,
    Outcome,
    Prefill,
    Router,
    Shape,
)
from diptych.connectors.handoff_prefill import step_prefill
from diptych.connectors.handoff_router import step_router

# frames on the worker streams, which resume, and news from the registry
_RELIABLE = (
    Event.FAILED,
    Event.PREFILL_TOKEN,
    Event.DECODE_TOKEN,
    Event.PREFILL_RESTARTED,
    Event.DECODE_RESTARTED,
)
_DECODE_BAD_LUCK = {
    State.OFFERED: (Event.TICKET_END,),
    State.DEFERRED: (Event.DEFER_DEADLINE,),
    State.RESERVED: (Event.READ_DEADLINE,),
    State.READING: (Event.READ_DEADLINE,),
    State.VALIDATING: (Event.VERDICT_DEADLINE,),
    State.STORE_READING: (Event.STORE_READ_FAILED,),
}
_DECODE_STEPS = {
    State.DEFERRED: (Event.ROOM,),
    State.VALIDATING: (Event.REPEAT,),
    State.STORE_READING: (Event.STORE_READ,),
    State.DECODING: (Event.STEP,),
    State.LOCAL: (Event.STEP,),
}
_PREFILL_BAD_LUCK = {
    State.PREFILLING: (Event.LEASE_END, Event.PREEMPT),
    State.HOLDING: (Event.LEASE_END, Event.PREEMPT, Event.RESERVE_DEADLINE),
}
_PREFILL_STEPS = {
    State.QUEUED: (Event.STEP,),
    State.PREFILLING: (Event.STEP, Event.REPEAT),
    State.HOLDING: (Event.REPEAT,),
    State.STORED: (Event.REPEAT,),
}

M = TypeVar("M", Router, Prefill, Decode, Router | Prefill | Decode)


class Moves:
    """Everything that can happen next, by one set of rules."""

    def __init__(self, rules: Rules, shape: Shape) -> None:
        self._rules = rules
        self._shape = shape
        self._messages: list[Message] = []
        self._names: dict[int, str] = {}
        self._bits: dict[Message, int] = {}
        self._machines: dict[object, object] = {}
        self._outcomes: dict[tuple[object, ...], tuple[Outcome, int]] = {}
        self._networks: dict[int, frozenset[Message]] = {}
        self._inert: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._idle = IdleMessages(rules)

    def start(self, faults: int) -> World:
        """The router has just issued its first tickets; prefill has the prefix hits cached."""
        machines = self._same(Router()), self._same(Prefill()), self._same(Decode())
        world = World(*machines, 0, self._shape.hits, 0, 0, faults)
        return self._with_router(world, "", Event.REPEAT, None, 0)

    def key(self, world: World) -> tuple[int, ...]:
        """Equal for equal worlds of this object, and quick to hash."""
        return (id(world.router), id(world.prefill), id(world.decode), *world[3:])

    def edges(self, world: World) -> Iterator[Edge]:
        """What can happen in `world`.

        Raises:
            Violation: it breaks an invariant.
        """
        for edge in self._edges(world):
            after = self._pruned(edge.world)
            yield edge if after is edge.world else Edge(edge.label, edge.is_fault, after)

    def _edges(self, world: World) -> Iterator[Edge]:
        yield from self._arrivals(world)
        yield from self._router_edges(world)
        yield from self._prefill_edges(world)
        yield from self._decode_edges(world)

    def _arrivals(self, world: World) -> Iterator[Edge]:
        """Every message under way arrives, arrives and stays, or is lost."""
        rest = world.network
        while rest:
            bit = rest & -rest
            rest ^= bit
            message = self._messages[bit.bit_length() - 1]
            without = world._replace(network=world.network ^ bit)
            name = self._names[bit]
            yield from self._arrival(without, name, message, False)
            if world.faults_left:
                poorer = world.faults_left - 1
                if message.kind not in _RELIABLE:
                    yield Edge(f"lost: {name}", True, without._replace(faults_left=poorer))
                twice = world._replace(faults_left=poorer)
                yield from self._arrival(twice, f"twice: {name}", message, True)

    def _arrival(self, world: World, name: str, message: Message, is_fault: bool) -> Iterator[Edge]:
        if message.target == PREFILL:
            after = self._with_prefill(world, name, message.kind, message)
            yield Edge(name, is_fault, after)
        elif message.target == DECODE:
            yield Edge(name, is_fault, self._with_decode(world, name, message.kind, message, 0))
            refusable = message.kind in ANNOUNCEMENTS and world.decode.state is State.OFFERED
            if refusable and world.faults_left and not is_fault:
                poorer = world._replace(faults_left=world.faults_left - 1)
                full = f"no room: {name}"
                yield Edge(full, True, self._with_decode(poorer, full, Event.NO_ROOM, message, 0))
        else:
            for retry_local in (0, 1):
                label = f"{name}, local" if retry_local else name
                after = self._with_router(world, label, message.kind, message, retry_local)
                yield Edge(label, is_fault, after)
                if after.router.epoch == world.router.epoch:
                    break

    def _router_edges(self, world: World) -> Iterator[Edge]:
        state = world.router.state
        if state is State.CLOSED:
            return
        after = self._with_router(world, "router repeats", Event.REPEAT, None, 0)
        if after is not world:
            yield Edge("router repeats", False, after)
        if world.faults_left and state in (State.ISSUED, State.STREAMING):
            poorer = world._replace(faults_left=world.faults_left - 1)
            name = "the client leaves"
            yield Edge(name, True, self._with_router(poorer, name, Event.CANCEL, None, 0))
            yield Edge("the router dies", True, self._without_router(poorer))

    def _without_router(self, world: World) -> World:
        """Its tickets are refused from now on; its workers notice in their own time."""
        tickets = [m for m in self._under_way(world.network) if m.kind in TICKETS]
        network = world.network & ~self._mask(tuple(tickets))
        gone = self._same(Router(State.CLOSED, epoch=0))
        return world._replace(router=gone, network=network)

    def _prefill_edges(self, world: World) -> Iterator[Edge]:
        prefill = world.prefill
        for event in _PREFILL_STEPS.get(prefill.state, ()):
            name = f"prefill: {event}"
            after = self._with_prefill(world, name, event, None)
            if after is not world:
                yield Edge(name, False, after)
            elif event is Event.STEP:
                raise Violation(NEVER_WAITS, name)
        if not world.router.epoch and prefill.state not in PREFILL_ENDS:
            name = "prefill: ROUTER_GONE"
            yield Edge(name, False, self._with_prefill(world, name, Event.ROUTER_GONE, None))
        if prefill.state is not State.PREFILLING:
            for block in _bits(world.good & ~prefill.leased):
                torn = world.bad | (block & world.decode.reading)
                name = f"prefill overwrites block {block:b}"
                yield Edge(name, True, world._replace(good=world.good & ~block, bad=torn))
        if not world.faults_left:
            return
        poorer = world._replace(faults_left=world.faults_left - 1)
        for event in _PREFILL_BAD_LUCK.get(prefill.state, ()):
            if event is Event.RESERVE_DEADLINE and prefill.acked:
                continue
            name = f"prefill: {event}"
            yield Edge(name, True, self._with_prefill(poorer, name, event, None))
        if prefill.state not in (State.IDLE, State.FREED) and not prefill.incarnation:
            news = Message(Event.PREFILL_RESTARTED, "router", incarnation=1)
            after = poorer._replace(prefill=self._same(Prefill(incarnation=1)), good=0)
            after = after._replace(bad=world.bad | world.decode.reading)
            yield Edge("prefill restarts", True, self._sent(after, (news,)))

    def _decode_edges(self, world: World) -> Iterator[Edge]:
        decode = world.decode
        for event in _DECODE_STEPS.get(decode.state, ()):
            name = f"decode: {event}"
            after = self._with_decode(world, name, event, None, 0)
            if after is not world:
                yield Edge(name, False, after)
        if not world.router.epoch and decode.state not in (*DECODE_ENDS, State.ABORTED):
            name = "decode: ROUTER_GONE"
            after = self._with_decode(world, name, Event.ROUTER_GONE, None, 0)
            yield Edge(name, False, after)
        for block in _bits(world.ghosts):
            name = f"a given-up read of block {block:b} ends"
            rest = world._replace(ghosts=world.ghosts & ~block)
            yield Edge(name, False, self._with_decode(rest, name, Event.READ_ENDED, None, block))
        pulling = decode.state in (State.RESERVED, State.READING)
        for block in _bits(decode.reading if pulling else 0):
            name = f"decode has read block {block:b}"
            yield Edge(name, False, self._with_decode(world, name, Event.READ_OK, None, block))
        if not world.faults_left:
            return
        poorer = world._replace(faults_left=world.faults_left - 1)
        for block in _bits(decode.reading if pulling else 0):
            name = f"the read of block {block:b} fails"
            after = self._with_decode(poorer, name, Event.READ_FAILED, None, block)
            yield Edge(name, True, after)
        for event in _DECODE_BAD_LUCK.get(decode.state, ()):
            name = f"decode: {event}"
            yield Edge(name, True, self._with_decode(poorer, name, event, None, 0))
        if decode.state not in DECODE_ENDS and not decode.incarnation:
            news = Message(Event.DECODE_RESTARTED, "router", incarnation=1)
            after = poorer._replace(decode=self._same(Decode(incarnation=1)), bad=0, ghosts=0)
            yield Edge("decode restarts", True, self._sent(after, (news,)))

    # --- what it leads to

    def _with_router(
        self,
        world: World,
        label: str,
        event: Event,
        message: Message | None,
        retry_local: int,
    ) -> World:
        router = world.router
        incarnations = (world.prefill.incarnation, world.decode.incarnation)
        key = (id(router), event, id(message), retry_local, incarnations)
        found = self._outcomes.get(key)
        if found is None:
            outcome = step_router(
                self._rules,
                self._shape,
                router,
                event,
                message,
                retry_local=bool(retry_local),
                incarnations=incarnations,
            )
            found = self._outcomes[key] = self._remembered(outcome)
        outcome, sent = found
        if event is Event.REPEAT:
            sent = self._due(world, outcome.messages)
        after = outcome.machine
        assert isinstance(after, Router)
        expected = tuple(range(router.delivered, after.delivered))
        if outcome.delivered != expected:
            raise Violation(POSITIONS, label)
        if after is router and not sent & ~world.network:
            return world
        return world._replace(router=after, network=world.network | sent)

    def _with_prefill(
        self, world: World, label: str, event: Event, message: Message | None
    ) -> World:
        prefill = world.prefill
        key = (id(prefill), event, id(message))
        found = self._outcomes.get(key)
        if found is None:
            outcome = step_prefill(self._rules, self._shape, prefill, event, message)
            found = self._outcomes[key] = self._remembered(outcome)
        outcome, sent = found
        if event is Event.REPEAT:
            sent = self._due(world, outcome.messages)
        after = outcome.machine
        assert isinstance(after, Prefill)
        self._check_sampled(world, outcome, after.epoch, label)
        good = world.good
        if event is Event.STEP and prefill.state is State.PREFILLING:
            good |= self._shape.chunks[prefill.number]
        if after is prefill and not sent & ~world.network and good == world.good:
            return world
        return world._replace(prefill=after, network=world.network | sent, good=good)

    def _with_decode(
        self, world: World, label: str, event: Event, message: Message | None, block: int
    ) -> World:
        decode = world.decode
        key = (id(decode), event, id(message), block)
        found = self._outcomes.get(key)
        if found is None:
            outcome = step_decode(self._rules, self._shape, decode, event, message, block)
            found = self._outcomes[key] = self._remembered(outcome)
        outcome, sent = found
        if event is Event.REPEAT:
            sent = self._due(world, outcome.messages)
        after = outcome.machine
        assert isinstance(after, Decode)
        self._check_sampled(world, outcome, decode.epoch, label)
        bad, ghosts = world.bad, world.ghosts
        newly_stored = after.state is State.STORE_READING is not decode.state
        if event is Event.READ_OK:
            bad |= block & ~world.good
        if event is Event.STORE_READ or after.state is State.LOCAL:
            bad = 0
        if event is not Event.STORE_READ:
            ended = block if event in (Event.READ_OK, Event.READ_FAILED) else 0
            ghosts |= decode.reading & ~after.reading & ~ended
            if after.epoch != decode.epoch or newly_stored:
                ghosts |= decode.reading
        bad &= after.have | after.reading
        after_world = world._replace(
            decode=after, network=world.network | sent, bad=bad, ghosts=ghosts
        )
        self._check_decode(world, after_world, label)
        same = after is decode and self.key(after_world) == self.key(world)
        return world if same else after_world

    def _due(self, world: World, messages: tuple[Message, ...]) -> int:
        """The messages whose repeat is due."""
        return self._mask(tuple(m for m in messages if not self._is_under_way(world, m)))

    def _is_under_way(self, world: World, message: Message) -> bool:
        """Whether the message or its answer is in the network, or the ticket was taken."""
        if message.kind in TICKETS:
            taker = world.prefill if message.target == PREFILL else world.decode
            return taker.epoch >= message.epoch
        network = self._under_way(world.network)
        if message in network:
            return True
        if message.kind is Event.READ_DONE:
            answers = (Event.VALID, Event.GONE)
            return any(m.kind in answers and m.epoch == message.epoch for m in network)
        if message.kind is Event.RELEASE:
            return any(
                m.kind is Event.RELEASED and (m.source, m.epoch) == (message.target, message.epoch)
                for m in network
            )
        return any(
            m.kind is Event.ACK and (m.epoch, m.number) == (message.epoch, message.number)
            for m in network
        )

    def _under_way(self, network: int) -> frozenset[Message]:
        found = self._networks.get(network)
        if found is None:
            found = frozenset(self._messages[bit.bit_length() - 1] for bit in _bits(network))
            self._networks[network] = found
        return found

    def _check_sampled(self, world: World, outcome: Outcome, epoch: int, label: str) -> None:
        """No position that the client has is sampled again by the current attempt."""
        sampled = outcome.sampled
        if sampled is None or epoch != world.router.epoch:
            return
        if sampled < world.router.delivered or sampled >= self._shape.num_tokens:
            raise Violation(POSITIONS, label)

    def _check_decode(self, before: World, after: World, label: str) -> None:
        decode = after.decode
        if after.ghosts & ~decode.quarantine or (decode.reading and not decode.held):
            raise Violation(DMA_TARGET, label)
        if decode.quarantine & ~after.ghosts:
            raise Violation(LEAK, label)
        if decode.state is State.DECODING and (after.bad or decode.have != self._shape.blocks):
            raise Violation(VALID_KV, label)
        old = before.decode
        left_end = old.state in DECODE_ENDS and decode.state not in (*DECODE_ENDS, State.ABORTED)
        if left_end and decode.epoch <= old.epoch:
            raise Violation(ONE_END, label)

    def _pruned(self, world: World) -> World:
        """The world without messages that can have no effect."""
        key = (id(world.router), id(world.prefill), id(world.decode))
        known, inert = self._inert.get(key, (0, 0))
        if world.network & ~known:
            for bit in _bits(world.network & ~known):
                message = self._messages[bit.bit_length() - 1]
                if self._idle.of(message, *world[:3]):
                    inert |= bit
            self._inert[key] = (known | world.network, inert)
        if world.network & inert:
            return world._replace(network=world.network & ~inert)
        return world

    def _remembered(self, outcome: Outcome) -> tuple[Outcome, int]:
        machine = self._same(outcome.machine)
        return outcome._replace(machine=machine), self._mask(outcome.messages)

    def _same(self, machine: M) -> M:
        """The one object that stands for all machines equal to this one."""
        return self._machines.setdefault(machine, machine)  # type: ignore[return-value]

    def _sent(self, world: World, messages: tuple[Message, ...]) -> World:
        return world._replace(network=world.network | self._mask(messages))

    def _mask(self, messages: tuple[Message, ...]) -> int:
        mask = 0
        for message in messages:
            bit = self._bits.get(message)
            if bit is None:
                bit = self._bits[message] = 1 << len(self._messages)
                self._messages.append(message)
                self._names[bit] = f"{message.kind}({message.epoch}) to {message.target}"
            mask |= bit
        return mask


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield mask & -mask
        mask &= mask - 1

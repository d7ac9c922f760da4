import pytest

from diptych.engine.request import EngineCoreOutputs, FinishReason, TokenLogprobs
from diptych.errors import EngineError
from diptych.sampling_params import SamplingParams
from diptych.text.output_processor import UNUSED_TOKEN_ID, OutputProcessor, RequestState
from diptych.text.processor import ProcessedRequest
from tests.text.vocabularies import byte_level

TOKENIZER = byte_level()
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def make_request(**params: object) -> ProcessedRequest:
    return ProcessedRequest(
        prompt="and",
        prompt_token_ids=ids_of("d. d"),
        sampling_params=SamplingParams(**{"max_tokens": 64, "seed": 0, **params}),
        eos_token_ids=[0],
    )


def make_state(**params: object) -> RequestState:
    return RequestState("r", make_request(**params), TOKENIZER)


def test_deltas_add_up_to_the_output() -> None:
    state = make_state()
    parts = [state.update(i, [token]).text for i, token in enumerate(ids_of("hello 世界"))]
    last = state.update(len(parts), ids_of("!"), finish_reason=LENGTH, num_cached_tokens=2)
    output = state.output()
    assert "".join(parts) + last.text == output.outputs[0].text == "hello 世界!"
    assert output.outputs[0].token_ids == ids_of("hello 世界!")
    assert (output.finished, output.outputs[0].finish_reason) == (True, "length")
    assert output.num_cached_tokens == 2


def test_a_position_is_taken_once() -> None:
    state = make_state()
    state.update(0, ids_of("s"))
    assert state.update(0, ids_of("s")).token_ids == []
    assert state.update(0, ids_of("sx")).text == "x"
    assert state.text == "sx"


def test_a_gap_is_an_error() -> None:
    state = make_state()
    state.update(0, ids_of("s"))
    with pytest.raises(EngineError, match="missing before position 2"):
        state.update(2, ids_of("x"))


def test_a_stop_string_ends_the_request_and_asks_for_an_abort() -> None:
    state = make_state(stop=["xt"], logprobs=0)
    ids = [ids_of(c)[0] for c in "sxtss"]
    packed = TokenLogprobs(width=1, token_ids=ids, logprobs=[-1.0] * 5, ranks=[1] * 5)
    delta = state.update(0, ids, logprobs=packed)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("s", STOP, "xt")
    assert delta.should_abort
    assert delta.token_ids == ids[:3], "tokens past the stop do not count"
    completion = state.output().outputs[0]
    assert completion.token_ids == ids[:3]
    assert (len(completion.logprobs or []), completion.cumulative_logprob) == (3, -3.0)
    assert state.update(5, ids).token_ids == [], "nothing is taken after the end"


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    delta = make_state(stop=["x"]).update(0, ids_of("x"), finish_reason=LENGTH)
    assert (delta.finish_reason, delta.stop_reason, delta.should_abort) == (STOP, "x", False)


def test_held_back_text_comes_out_at_the_end() -> None:
    state = make_state(stop=["stop!"])
    assert state.update(0, ids_of("a sto")).text == "a "
    assert state.end(FinishReason.ABORT).text == "sto"
    assert state.output().outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(("stop_token_ids", "reason"), [([90], 90), ([], None)])
def test_a_stop_token_is_the_reason_and_end_of_sequence_is_not(
    stop_token_ids: list[int], reason: int | None
) -> None:
    state = make_state(stop_token_ids=stop_token_ids)
    delta = state.update(0, [*ids_of("s"), 90], finish_reason=STOP, stop_token_id=90)
    assert (delta.text, delta.stop_reason, delta.token_ids) == ("s", reason, [*ids_of("s"), 90])


def test_logprobs_name_the_token_first_then_the_best() -> None:
    state = make_state(logprobs=2)
    a, b, c = (ids_of(char)[0] for char in "sxt")
    packed = TokenLogprobs(
        width=3,
        token_ids=[c, a, b, a, a, UNUSED_TOKEN_ID],
        logprobs=[-3.0, -0.5, -1.0, -0.1, -0.1, 0.0],
        ranks=[3, 1],
    )
    delta = state.update(0, [c, a], logprobs=packed)
    assert delta.logprobs is not None
    assert [(i, tuple(p)) for i, p in delta.logprobs[0].items()] == [
        (c, (-3.0, 3, "t")),
        (a, (-0.5, 1, "s")),
        (b, (-1.0, 2, "x")),
    ]
    assert delta.logprobs[1] == {a: (-0.1, 1, "s")}
    assert state.output().outputs[0].cumulative_logprob == pytest.approx(-3.1)


def test_logprobs_follow_the_positions_that_are_new() -> None:
    state = make_state(logprobs=0)
    a, b = ids_of("s")[0], ids_of("x")[0]
    first = TokenLogprobs(width=1, token_ids=[a], logprobs=[-1.0], ranks=[1])
    both = TokenLogprobs(width=1, token_ids=[a, b], logprobs=[-9.0, -2.0], ranks=[1, 1])
    state.update(0, [a], logprobs=first)
    state.update(0, [a, b], logprobs=both)
    assert [at[i].logprob for at, i in zip(state.logprobs or [], [a, b], strict=True)] == [-1, -2]


def test_prompt_logprobs_come_in_chunks_after_a_none() -> None:
    state = make_state(prompt_logprobs=0)
    prompt = state.request.prompt_token_ids
    for chunk in (prompt[1:2], prompt[2:]):
        state.update(
            0,
            [],
            prompt_logprobs=TokenLogprobs(
                width=1, token_ids=chunk, logprobs=[-1.0] * len(chunk), ranks=[1] * len(chunk)
            ),
        )
    entries = state.output().prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [next(iter(entry or {})) for entry in entries[1:]] == prompt[1:]


def test_without_detokenize_there_is_no_text() -> None:
    state = make_state(detokenize=False)
    state.update(0, ids_of("s"), finish_reason=LENGTH)
    assert (state.text, state.token_ids) == ("", ids_of("s"))


def test_a_step_is_shared_out_by_request() -> None:
    processor = OutputProcessor(TOKENIZER)
    for name in ("a", "b"):
        processor.add(name, make_request())
    with pytest.raises(EngineError, match="in use"):
        processor.add("a", make_request())
    results = processor.process(
        EngineCoreOutputs(
            request_ids=["a", "gone", "b"],
            first_positions=[0, 4, 0],
            token_counts=[2, 1, 1],
            token_ids=[*ids_of("sx"), 7, *ids_of("t")],
            finish_reasons=[0, 0, int(LENGTH)],
            stop_token_ids=[-1, -1, -1],
            num_cached_tokens=[0, 0, 0],
        )
    )
    assert [(state.request_id, delta.text) for state, delta in results] == [("a", "sx"), ("b", "t")]
    assert len(processor) == 1
    assert processor.drop("a") is not None
    assert processor.drop("a") is None

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych import LLM, SamplingParams
from diptych.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from diptych.outputs import RequestOutput
from tests.tiny_models import make_tiny_model

PROMPT = "What is the capital of France? "
PROMPTS = ["the capital of", "What is the weather in the mountains?", "one, two,", "Hello"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with make_llm(model) as llm:
        yield llm


def make_llm(model: Path, **arguments: Any) -> LLM:
    return LLM(str(model), device="cpu", num_kv_blocks=256, num_threads=1, **arguments)


def answer(llm: LLM, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def tokens(llm: LLM, prompt: Any = PROMPT, **params: Any) -> list[int]:
    return answer(llm, prompt, **params).outputs[0].token_ids


def text(llm: LLM, **params: Any) -> str:
    return answer(llm, **params).outputs[0].text


def test_results_are_in_order_and_as_if_alone(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 3, 12, 1)
    ]
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.prompt for o in together] == PROMPTS
    for output, one in zip(together, params, strict=True):
        alone = llm.generate(output.prompt, one, use_tqdm=False)[0]
        assert output.finished
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        assert output.prompt_token_ids == alone.prompt_token_ids


def test_the_forms_of_a_prompt_are_one(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    forms: list[Any] = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}, [PROMPT], [ids]]
    answers = [tokens(llm, form) for form in forms]
    assert all(a == answers[0] for a in answers)


def test_chat_answers_the_templated_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    one, *_ = llm.chat(messages, params, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.get_tokenizer().encode(one.prompt, add_special_tokens=False)
    assert one.outputs[0].token_ids == tokens(llm, ids, max_tokens=8, ignore_eos=False)
    assert len(llm.chat([messages, messages], params, use_tqdm=False)) == 2


def test_seeded_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.2, seed=i, max_tokens=16) for i in range(4)]
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_runs_repeat_with_the_seed_of_the_engine(model: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with make_llm(model, seed=seed) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=1.0), use_tqdm=False)
            return [o.outputs[0].token_ids for o in outputs]

    assert run(1) == run(1) != run(2)


def test_prefix_caching_changes_the_work_not_the_answer(llm: LLM, model: Path) -> None:
    shared = "one, two, three, four, five: the numbers that we count on our hands. " * 3
    prompts = [shared + "Hello", shared + "the train"]
    cached = [answer(llm, p) for p in prompts]
    with make_llm(model, enable_prefix_caching=False) as plain:
        computed = [answer(plain, p) for p in prompts]
    assert [o.outputs[0].token_ids for o in cached] == [o.outputs[0].token_ids for o in computed]
    assert cached[1].num_cached_tokens >= 16
    assert [o.num_cached_tokens for o in computed] == [0, 0]


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("a request enters the queue, waits for a block " * 3)
    cached = [
        answer(llm, {"prompt_token_ids": ids, "cache_salt": salt}).num_cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] >= 16


def test_more_prompts_than_the_queue_holds_run_to_the_end(model: Path) -> None:
    with make_llm(model, max_num_queued_reqs=3, max_num_seqs=2) as llm:
        outputs = llm.generate(
            PROMPTS * 4, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False
        )
    assert [o.prompt for o in outputs] == PROMPTS * 4
    assert all(o.finished for o in outputs)


def test_a_stop_string_cuts_text_and_tokens(llm: LLM) -> None:
    whole = answer(llm, max_tokens=32).outputs[0]
    stop = whole.text[8:11]
    cut = answer(llm, max_tokens=32, stop=[stop]).outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 32
    kept = answer(llm, max_tokens=32, stop=stop, include_stop_str_in_output=True).outputs[0]
    assert kept.text == cut.text + stop


def test_logprobs_are_those_of_the_chosen_tokens(llm: LLM) -> None:
    output = answer(llm, logprobs=3, max_tokens=6).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == 6
    for token_id, at in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(at)) == token_id
        assert at[token_id].rank == 1, "greedy takes the most likely"
        assert len(at) == 3
        assert [p.rank for p in at.values()] == [1, 2, 3]
        assert [p.logprob for p in at.values()] == sorted(p.logprob for p in at.values())[::-1]
        assert at[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)
    chosen = [at[i].logprob for i, at in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))


def test_prompt_logprobs_agree_with_those_of_the_output(llm: LLM) -> None:
    first = answer(llm, logprobs=0, max_tokens=8)
    generated = first.outputs[0]
    assert generated.logprobs is not None
    again = answer(
        llm, first.prompt_token_ids + generated.token_ids, prompt_logprobs=2, max_tokens=1
    )
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == len(again.prompt_token_ids)
    for token_id, at, wanted in zip(
        generated.token_ids, again.prompt_logprobs[-8:], generated.logprobs, strict=True
    ):
        assert at is not None
        assert at[token_id].logprob == pytest.approx(wanted[token_id].logprob, abs=1e-4)
        assert [p.rank for p in at.values()] == [1, 2], "greedy chose the most likely"


def test_temperature_seed_and_noise(llm: LLM) -> None:
    greedy = tokens(llm)
    hot = tokens(llm, temperature=1.5, seed=3)
    assert hot != greedy
    assert hot == tokens(llm, temperature=1.5, seed=3)
    assert hot != tokens(llm, temperature=1.5, seed=4)


@pytest.mark.parametrize("only_best", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(llm: LLM, only_best: dict[str, Any]) -> None:
    assert tokens(llm, temperature=1.5, seed=3, **only_best) == tokens(llm)


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}]
)
def test_a_penalty_makes_repeats_rarer(llm: LLM, penalty: dict[str, Any]) -> None:
    bias = {40: 20.0, 41: 20.0, 42: 20.0, 43: 20.0}  # few tokens, so that greedy repeats itself
    plain = tokens(llm, logit_bias=bias)
    other = tokens(llm, logit_bias=bias, **penalty)
    assert plain != other
    assert max(map(other.count, other)) <= max(map(plain.count, plain))


def test_logit_bias_and_allowed_tokens_steer_the_choice(llm: LLM) -> None:
    assert tokens(llm, logit_bias={50: 100.0}, max_tokens=4) == [50] * 4
    assert set(tokens(llm, allowed_token_ids=[60, 61])) <= {60, 61}
    assert 50 not in tokens(llm, logit_bias={50: -100.0})


def test_bad_words_do_not_appear(llm: LLM) -> None:
    word = next(w for w in text(llm, max_tokens=32).split() if w.isascii())
    assert word not in text(llm, max_tokens=32, bad_words=[word]).split()


def test_end_of_sequence_ends_unless_ignored(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    bias = {eos: 100.0}
    ended = answer(llm, logit_bias=bias, ignore_eos=False).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([eos], "stop", None)
    assert ended.text == ""
    assert tokens(llm, logit_bias=bias, max_tokens=4) == [eos] * 4


def test_min_tokens_come_before_any_end(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    ids = tokens(llm, logit_bias={eos: 100.0}, ignore_eos=False, min_tokens=3)
    assert len(ids) == 4
    assert ids[-1] == eos
    assert eos not in ids[:-1]


def test_a_stop_token_ends_the_output(llm: LLM) -> None:
    output = answer(llm, logit_bias={70: 100.0}, stop_token_ids=[70]).outputs[0]
    assert (output.token_ids, output.text) == ([70], "")
    assert (output.finish_reason, output.stop_reason) == ("stop", 70)


def test_special_tokens_and_text_are_made_as_asked(llm: LLM) -> None:
    params: dict[str, Any] = {
        "logit_bias": {llm.get_tokenizer().eos_token_id: 100.0},
        "max_tokens": 2,
    }
    assert text(llm, **params) == ""
    assert text(llm, **params, skip_special_tokens=False) == "<|im_end|>" * 2
    silent = answer(llm, detokenize=False).outputs[0]
    assert (silent.text, silent.token_ids) == ("", tokens(llm))


def test_max_tokens_is_cut_to_the_context(model: Path) -> None:
    with make_llm(model, max_model_len=32) as llm:
        output = answer(llm, [5] * 30, max_tokens=100).outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (2, "length")
        with pytest.raises(ContextLengthError, match="32 tokens"):
            answer(llm, [5] * 32)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "must not be empty"),
        ([""], None, "must not be empty"),
        ([[1, 10_000]], None, "outside the vocabulary"),
        ({"prompt_embeds": 1}, None, "cannot have prompt_embeds"),
        (3, None, "a prompt is a text"),
        (["a", "b"], [SamplingParams()], "2 prompts but 1 sampling_params"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert tokens(llm), "the engine goes on"


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], SamplingParams(), use_tqdm=False) == []


def test_an_argument_that_cannot_be_met_is_named(model: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="tensor_parallel_size=2"):
        LLM(str(model), tensor_parallel_size=2)


def test_after_shutdown_nothing_runs(model: Path) -> None:
    llm = make_llm(model)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        answer(llm)


def test_an_interrupted_run_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step, steps = llm._core.step, iter(range(3))

    def step() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return real_step()

    monkeypatch.setattr(llm._core, "step", step)
    with pytest.raises(KeyboardInterrupt):
        answer(llm, max_tokens=200)
    monkeypatch.undo()
    assert len(tokens(llm, "Hello", max_tokens=3)) == 3
    stats = llm._core.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=2))
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "4/4" in shown
    assert "output:" in shown


def test_token_ids_need_no_tokenizer(model: Path, llm: LLM, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model / name)
    prompt = llm.get_tokenizer().encode(PROMPT)
    expected = tokens(llm, prompt)
    with make_llm(tmp_path, skip_tokenizer_init=True) as bare:
        output = answer(bare, prompt)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].text == ""
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            answer(bare, PROMPT)
        with pytest.raises(InvalidRequestError, match="stop"):
            answer(bare, prompt, stop="x")

"""The engine's thread on a GPU: chunks beside decode steps, prefixes, admission, and an exit in the middle."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_graphs_gpu import llm_of

from minillm import SamplingParams
from minillm.errors import EngineError
from minillm.state import DecodeState

CUDA = torch.device("cuda", 0)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(1003, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_state_admitted_on_the_gpu_is_that_of_the_cpu() -> None:
    """Every field of a row, and none of its neighbours, from one copy."""
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.3)
    states = [DecodeState.allocate(3, 1003, device) for device in (CUDA, torch.device("cpu"))]
    for state in states:
        state.admit(1, [5, 6, 7, 5], 50, [3, 1002], params, 2**63 + 12345)
        state.admit(2, [9], 2**31, [], SamplingParams(temperature=0), 7)
    for on_gpu, on_cpu in zip(*(state.snapshot() for state in states), strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)


def test_a_long_prompt_beside_decoding_rows_changes_no_text() -> None:
    prompts = [ids(5, 1), ids(7, 2), ids(400, 3), ids(3, 4)]
    with llm_of(dtype=torch.float32) as llm:
        alone = [llm.generate(p, GREEDY).token_ids for p in prompts]
    for chunk in (16, 64, 1000):
        with llm_of(dtype=torch.float32, prefill_chunk=chunk, prefix_reuse=False) as llm:
            handles = [llm.submit(p, GREEDY) for p in prompts[:2]]
            next(iter(handles[0]))
            handles += [llm.submit(p, GREEDY) for p in prompts[2:]]
            assert [handle.result(60).token_ids for handle in handles] == alone


def test_the_second_turn_starts_where_the_first_ended() -> None:
    with llm_of(dtype=torch.float32) as llm, llm_of(dtype=torch.float32, prefix_reuse=False) as without:
        first = llm.generate(ids(100, 1), GREEDY)
        turn = first.prompt_token_ids + first.token_ids + ids(20, 2)
        second = llm.generate(turn, GREEDY)
        assert second.stats.cached_tokens == 159
        assert second.token_ids == without.generate(turn, GREEDY).token_ids
        both = llm.generate([turn, turn + ids(3, 3), ids(30, 4)], GREEDY)  # copied to other rows
        assert [c.stats.cached_tokens for c in both] == [179, 180, 0]
        for completion in both:
            assert completion.token_ids == without.generate(completion.prompt_token_ids, GREEDY).token_ids


def test_cancelled_rows_serve_the_next_while_steps_are_under_way() -> None:
    with llm_of(dtype=torch.float32, rows=2) as llm:
        expected = llm.generate(ids(9, 5), GREEDY).token_ids
        for _ in range(30):
            for _, chunk in zip(range(3), handle := llm.submit(ids(6, 6), GREEDY), strict=False):
                assert chunk.token_ids
            handle.cancel()
            assert llm.generate(ids(9, 5), GREEDY).token_ids == expected


def test_out_of_memory_in_a_step_ends_the_open_requests_and_the_next_is_served() -> None:
    with llm_of(dtype=torch.float32) as llm:
        expected, engine = llm.generate([5, 6], GREEDY).token_ids, llm._service.engine
        step = engine.runner.step

        def fail(*_: object) -> None:
            engine.runner.step = step  # type: ignore[method-assign]
            torch.empty(2**50, device=CUDA)

        engine.runner.step = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="out of memory"):
            llm.generate([5, 6], GREEDY)
        assert llm.generate([5, 6], GREEDY).token_ids == expected


def test_the_interpreter_exits_in_the_middle_of_requests() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/gpu']\n"
        "from test_graphs_gpu import llm_of\n"
        "from minillm import SamplingParams\n"
        "llm = llm_of()\n"
        "handles = [llm.submit([5, 6], SamplingParams(max_tokens=500)) for _ in range(40)]\n"
        "next(iter(handles[0])); print('bye')"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=root)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "bye\n", "")

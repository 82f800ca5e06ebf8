"""`python -m minillm.bench decode|serve|traffic|pool`: what a decode step costs here, beside what it must at least.

A figure without its circumstances says nothing, so every table names the machine, the versions, the command, and the
memory bandwidth measured in the same run; and every decode row stands beside its floor, the bytes that the step must
read divided by that bandwidth. What is compared is alternated, run for run, so that a machine that warms up or slows
down does so for all.

    decode   the time of one step: eager, one CUDA Graph, and transformers doing the same work
    serve    batches of mixed sizes one after another: latency, its jitter, requests per second
    traffic  requests that come and go: latency, requests per second, and what the engine leaves of a bare replay
    pool     the memory that the graphs hold, for three ways to record them

Read `runtime.py` (what is measured), then `decode.py`; `report.py` is the arithmetic and the table.
"""

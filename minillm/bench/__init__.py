"""`python -m minillm.bench decode|prefill|serve|traffic|launches|pool|retarget|pieces|picture`: what steps cost.

A figure without its circumstances says nothing, so every table names the machine, the versions, the command, and the
ceiling measured in the same run, of memory bandwidth or of arithmetic; and every decode step and every prefill stands
beside its floor, what it must read or compute divided by that ceiling. What is compared is alternated, run for run, so
that a machine that warms up or slows down does so for all.

    decode   the time of one step: eager, one CUDA Graph, and transformers doing the same work
    prefill  the time from a prompt to the logits of its next token, with transformers beside it
    serve    batches of mixed sizes one after another: latency, its jitter, requests per second
    traffic  requests that come and go: latency, requests per second, and what the engine leaves of a bare replay
    launches many tokens in one launch: several steps in a recording, or a loop on the device
    pool     the memory that the graphs hold, for three ways to record them
    retarget the graphs pointed at another cache or other weights, beside capturing them anew
    pieces   a step captured as one graph, or as several
    picture  measures nothing: draws what `decode --json` has written

Read `runtime.py` (what is measured), then `decode.py` or `prefill.py`; `report.py` is the arithmetic and the table.
"""

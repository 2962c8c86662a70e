"""llama.cpp, as the wheel xllamacpp holds it, in a process of its own: it and the ggml of other tests have equal names.

    python llama_cpp_process.py MODEL < [[token, ...], ...]  >  [[{"id": 7042, "top_logprobs": [...]}, ...], ...]

Continues every list of tokens greedily, and gives the likeliest tokens at each step.
"""

import json
import sys

import xllamacpp


def main() -> None:
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 256, 1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    answers = [
        server.handle_completions({"prompt": ids, "n_predict": 24, "logprobs": 100, "temperature": 0.0})
        for ids in json.load(sys.stdin)
    ]
    print(json.dumps([answer["choices"][0]["logprobs"]["content"] for answer in answers]))


if __name__ == "__main__":
    main()

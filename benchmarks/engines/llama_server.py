"""llama.cpp's server as xllamacpp packages it, with the options that poisson.py gives llama-server.

python llama_server.py --model GGUF --host HOST --port PORT --threads N --parallel N --ctx-size N
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--host"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--threads", "--parallel", "--ctx-size"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    settings = xllamacpp.CommonParams()
    settings.model.path = arguments.model
    settings.hostnames, settings.port = [arguments.host], arguments.port
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = arguments.threads
    settings.n_parallel, settings.n_ctx = arguments.parallel, arguments.ctx_size
    settings.verbosity = 0
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()

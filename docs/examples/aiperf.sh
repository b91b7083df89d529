#!/usr/bin/env bash
# AIPerf: pip install aiperf
set -euo pipefail
url=${NANO_INFERENCE_URL:-http://127.0.0.1:8000}
key=${NANO_INFERENCE_API_KEY:-none}
# Where the served model lies; its tokenizer makes the prompts.
model=${NANO_INFERENCE_MODEL:-$(dirname "$0")/../../models/tiny}
results=$(realpath "${1:-.}")
# With it set, AIPerf does not take a folder for a tokenizer.
unset HF_HUB_OFFLINE

# 20 requests, 4 at a time, each of 32 tokens and what the chat template adds, and answers of 16
# tokens. How many there were the server says: texts leave special tokens out.
aiperf profile --url "$url" --api-key "$key" --model tiny --tokenizer "$(realpath "$model")" \
  --endpoint-type chat --streaming --use-server-token-count \
  --request-count 20 --concurrency 4 --random-seed 1 \
  --synthetic-input-tokens-mean 32 --synthetic-input-tokens-stddev 0 \
  --output-tokens-mean 16 --output-tokens-stddev 0 --extra-inputs ignore_eos:true \
  --ui none --output-artifact-dir "$results"

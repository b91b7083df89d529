#!/usr/bin/env bash
# Inspect: pip install inspect-ai openai
set -euo pipefail
url=${NANO_INFERENCE_URL:-http://127.0.0.1:8000}
key=${NANO_INFERENCE_API_KEY:-none}
results=$(realpath "${1:-.}")
cd "$(dirname "$0")/tasks"
ask=(inspect eval questions.py --temperature 0 --display plain --log-format json)

# By chats. Its provider named openai leaves the temperature out of those: a name that it does not
# know is OpenAI's next model to it.
export NANO_BASE_URL=$url/v1 NANO_API_KEY=$key
"${ask[@]}" --model openai-api/nano/tiny --log-dir "$results/chats"

# By responses.
export OPENAI_BASE_URL=$url/v1 OPENAI_API_KEY=$key
"${ask[@]}" --model openai/tiny --log-dir "$results/responses"

# By its provider for vLLM, which is to start no server of its own.
export VLLM_BASE_URL=$url/v1 VLLM_API_KEY=$key
"${ask[@]}" --model vllm/tiny --log-dir "$results/vllm"

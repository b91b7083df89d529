#!/usr/bin/env bash
# GuideLLM: pip install guidellm
set -euo pipefail
url=${NANO_INFERENCE_URL:-http://127.0.0.1:8000}
key=${NANO_INFERENCE_API_KEY:-none}
# Where the served model lies; its tokenizer makes the prompts.
model=${NANO_INFERENCE_MODEL:-$(dirname "$0")/../../models/tiny}
results=$(realpath "${1:-.}")

# 20 requests, 4 at a time, of 32 tokens, or nearly, and what the chat template adds, and answers of
# 16 tokens.
guidellm run --backend "kind=openai_http,target=$url,api_key=$key,model=tiny" \
  --tokenizer "kind=huggingface_auto,model=$(realpath "$model")" \
  --data kind=synthetic_text,prompt_tokens=32,output_tokens=16 \
  --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=20 \
  --output "kind=json,path=$results/guidellm.json" --disable-console-interactive

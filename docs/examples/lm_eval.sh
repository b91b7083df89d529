#!/usr/bin/env bash
# lm-evaluation-harness: pip install "lm-eval[api]"
set -euo pipefail
url=${NANO_INFERENCE_URL:-http://127.0.0.1:8000}
key=${NANO_INFERENCE_API_KEY:-none}
results=$(realpath "${1:-.}")
# Tasks name their files from here.
cd "$(dirname "$0")"

# The first is for answers, auth_token for tokens.
export OPENAI_API_KEY=$key

# By loglikelihoods and by generation, four prompts in a call. The server makes tokens of texts
# (/tokenize), so the harness needs no tokenizer; a prompt and its next token fit the model's length.
lm_eval run --model local-completions \
  --model_args "model=tiny,base_url=$url/v1/completions,max_length=2048,num_concurrent=4,auth_token=$key" \
  --batch_size 4 --include_path tasks --tasks tiny_choices,tiny_texts,tiny_answers \
  --output_path "$results/completions" --log_samples

# As a chat.
lm_eval run --model local-chat-completions --apply_chat_template \
  --model_args "model=tiny,base_url=$url/v1/chat/completions,num_concurrent=4" \
  --include_path tasks --tasks tiny_chats \
  --output_path "$results/chats" --log_samples

#!/usr/bin/env bash
# OpenAI's and Anthropic's interfaces by hand.
set -euo pipefail
url=${NANO_INFERENCE_URL:-http://127.0.0.1:8000}

post() {
  curl -sS --fail-with-body -N "$url$1" -H 'Content-Type: application/json' -d "$2"
  echo
}

post /v1/chat/completions '{
  "model": "tiny",
  "messages": [{"role": "user", "content": "How much is 6 + 6?"}],
  "temperature": 0
}'

# A stream of events.
post /v1/chat/completions '{
  "model": "tiny",
  "messages": [{"role": "user", "content": "How much is 6 + 6?"}],
  "temperature": 0,
  "stream": true,
  "stream_options": {"include_usage": true}
}'

post /v1/responses '{
  "model": "tiny",
  "input": "How much is 6 + 6?",
  "temperature": 0
}'

post /v1/messages '{
  "model": "tiny",
  "max_tokens": 100,
  "messages": [{"role": "user", "content": "How much is 6 + 6?"}],
  "temperature": 0
}'

#!/usr/bin/env bash
# onnxruntime-genai 0.18.0: its builder exports a Mistral with a sliding window as a model that attends to all tokens,
# and has the runtime size the KV cache for the window. The builder gives a layer a window if the configuration's
# `layer_types` says so. Mistral's configuration (of Mistral 7B v0.1, say) has no `layer_types`: all its layers have
# `sliding_window`. Its `genai_config.json` has the window with an empty list of layers, which the runtime takes for all.
#
# Seen with onnxruntime-genai 0.18.0, onnxruntime 1.32.0 and transformers 5.24.0 on a CPU, a Mistral with random weights
# and a window of 8: up to 8 tokens its logits are transformers' (0.00001 apart). Of 12 and 20 tokens they are those of
# a model without a window, and 5.7 and 10 apart from transformers'. A prompt of 40 tokens, where `max_length` is 128,
# raises: its cache has 24 places. With `past_present_share_buffer` false it has room, and attends to all 40. A KV
# cache that calls such pages by the checkpoint's name mixes two models. Fails (exit 1) where that is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -q --no-compile "torch==2.13.0" "transformers==5.24.0" "numpy<2.5" \
	"onnx==1.23.2" "onnx-ir==1.1.0" "onnxruntime==1.32.0" "onnxruntime-genai==0.18.0"
cd "$folder"
cat >model.py <<'PY'
import torch
from tokenizers import Tokenizer, models
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
config = MistralConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=256, max_position_embeddings=512, initializer_range=0.3, sliding_window=8,
)
MistralForCausalLM(config).save_pretrained("mistral")
words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(256)}, unk_token="t3"))
PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", unk_token="t3").save_pretrained("mistral")
PY
env/bin/python model.py 2>/dev/null
env/bin/python -m onnxruntime_genai.models.builder -m ./mistral -o exported -p fp32 -e cpu -c cache >build.log 2>&1 ||
	{ tail -5 build.log; exit 1; }
env/bin/python - 2>/dev/null <<'PY'
import importlib.metadata as metadata
import json
import sys

import numpy as np
import onnx
import onnxruntime_genai as genai
import torch
from transformers import MistralForCausalLM

print({name: metadata.version(name) for name in ("onnxruntime-genai", "onnxruntime", "transformers")})
tokens = np.random.default_rng(0).integers(3, 250, 40).astype(np.int32)
config = json.load(open("exported/genai_config.json"))["model"]["decoder"]["sliding_window"]
nodes = [node for node in onnx.load("exported/model.onnx").graph.node if node.op_type == "GroupQueryAttention"]
windows = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "local_window_size"]
print("genai_config.json:", config, "; local_window_size of the model's layers:", windows)


def exported(count: int, **options: object) -> np.ndarray:
    model = genai.Model("exported")
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=128, **options)
    generator = genai.Generator(model, params)
    generator.append_tokens(tokens[:count])
    return np.array(generator.get_logits()).reshape(-1, 256)[-1]


def original(count: int, window: int | None) -> np.ndarray:
    model = MistralForCausalLM.from_pretrained("mistral", sliding_window=window, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(tokens[None, :count], dtype=torch.long)).logits[0, -1].numpy()


seen = []
for count in (8, 12, 20):
    found = exported(count)
    apart = [float(np.abs(found - original(count, window)).max()) for window in (8, None)]
    print(f"{count} tokens: {apart[0]:.2g} from the model with its window, {apart[1]:.2g} from one without")
    seen.append(apart)
try:
    exported(40)
    refused = False
except RuntimeError as error:
    refused = True
    print("40 tokens:", str(error)[-110:].strip())
roomy = exported(40, past_present_share_buffer=False)
apart = [float(np.abs(roomy - original(40, window)).max()) for window in (8, None)]
print(f"40 tokens, past_present_share_buffer false: {apart[0]:.2g} and {apart[1]:.2g}")
seen.append(apart)
near = [without < 0.001 for _, without in seen]
sys.exit(not (config["window_size"] == 8 and set(windows) == {-1} and refused and all(near)
              and seen[0][0] < 0.001 and all(with_ > 1 for with_, _ in seen[1:])))
PY

"""Adapters for inference engines: vllm/, sglang/ and transformers.py. Modules shared by them import no engine."""

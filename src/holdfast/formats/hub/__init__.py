"""Safetensors files, and the folders of the Hugging Face Hub and of peft that consist of them."""

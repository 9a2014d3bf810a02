"""Validation: pictures with and without the LoRA, and the proof that split and unsplit training are the same."""

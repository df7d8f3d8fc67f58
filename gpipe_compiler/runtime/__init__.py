"""What an emitted package runs on; copied into it, so it imports torch and safetensors only."""

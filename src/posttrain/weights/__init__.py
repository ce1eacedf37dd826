"""How the policy's weights reach a sampler that has its own copy: checked, moved, versioned, probed."""

"""What do we ask of dense MLA: decode over a paged latent cache, its plans, partial results and prefill?"""

"""What is right in dense MLA: attention over a paged latent cache, plans, partial results and prefill?"""

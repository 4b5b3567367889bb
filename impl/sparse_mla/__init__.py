"""Who answers the sparse MLA ops."""

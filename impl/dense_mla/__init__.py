"""Who answers the ops of dense MLA?"""

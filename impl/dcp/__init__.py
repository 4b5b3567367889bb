"""Who answers the ops of decode context parallelism?"""

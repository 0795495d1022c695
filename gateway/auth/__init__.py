"""Keys of teams and programs: who has which, what each may use, and what each has used."""

"""Callbacks for trainers of other libraries, one module each; each needs its library, which nothing else imports."""

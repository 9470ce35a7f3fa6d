"""Names for strings that a recipe gives a meaning; the config layer checks what each one promises."""

# A length of training as Composer writes it: a number and a unit ("500ba" batches, "2ep" epochs, "1000sp"
# samples).
Duration = str

# A local file or folder that must exist when the recipe starts; relative to the folder the command runs in.
InputPath = str

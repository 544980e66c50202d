"""The scalar programs that engines run: operations, builder, operators, texts, renderers."""

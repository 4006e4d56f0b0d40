# Rows of your own, from a file to an answering model.
cat > capitals.jsonl <<'ROWS'
{"prompt": "Capital of France?", "completion": "Paris."}
{"prompt": "Capital of Italy?", "completion": "Rome."}
{"prompt": "Capital of Spain?", "completion": "Madrid."}
ROWS
jaxtune train lora-0.5b data.train=capitals.jsonl data.length=256 epochs=20 --check
jaxtune train lora-0.5b data.train=capitals.jsonl data.length=256 epochs=20 output=runs/capitals
jaxtune generate runs/capitals/merged --prompt "Capital of Italy?" --max-new-tokens 8

{{- /* The bytes of a size. Arguments: the size, and a pattern of sizes whose unit is a power of 1000. */ -}}
{{- define "ffserve.bytes" -}}
{{- $size := index . 0 | nospace -}}
{{- $base := ternary 1000.0 1024.0 (regexMatch (index . 1) $size) -}}
{{- $bytes := regexFind "^[0-9.]+" $size | float64 -}}
{{- range until (index (dict "K" 1 "M" 2 "G" 3 "T" 4) (regexFind "[KMGT]" $size)) -}}
{{- $bytes = mulf $bytes $base -}}
{{- end -}}
{{- $bytes -}}
{{- end -}}

{{- /* Refuse what no daemon could start with. */ -}}
{{- define "ffserve.check" -}}
{{- $arena := include "ffserve.bytes" (list .Values.arena "[KMGT]B$") | float64 -}}
{{- $memory := include "ffserve.bytes" (list .Values.memory "[KMGT]$") | float64 -}}
{{- /* 32 MiB: what the daemon needs itself (OWN_SIZE of ffserve/limits.py). */ -}}
{{- if gt (addf $arena 33554432.0) $memory -}}
{{- fail (printf "an arena of %s does not fit into memory: %s, the limit of the pod: raise memory to 1 GiB more than the arena, or lower arena" .Values.arena .Values.memory) -}}
{{- end -}}
{{- with (fromToml (include "ffserve.settings" .)).Error -}}
{{- fail (printf "config is not valid behind arena, socket and http, which this chart sets: %s" .) -}}
{{- end -}}
{{- end -}}

{{- define "ffserve.settings" -}}
arena = {{ .Values.arena | quote }}
socket = "/run/ffserve/ffserve.sock"
{{- if .Values.httpPort }}
http = "0.0.0.0:{{ .Values.httpPort }}"
{{- end }}
{{ .Values.config | trim }}
{{- end -}}

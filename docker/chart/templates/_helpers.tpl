{{/* Our own image by the name of its value. */}}
{{- define "proofline.image" -}}
{{- $images := .root.Values.images -}}
{{ $images.prefix }}{{ get $images .name }}{{ if $images.tag }}:{{ $images.tag }}{{ end }}
{{- end }}

{{/* What all pods have in common. */}}
{{- define "proofline.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "proofline.container" -}}
securityContext: { allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: { drop: [ALL] } }
{{- end }}

{{/* Where pods may run: .place has nodeSelector and tolerations, .class names a priority class. */}}
{{- define "proofline.place" -}}
{{- with .place.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .place.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- $classes := .root.Values.priorityClasses }}
{{- $class := get $classes .class | default (ternary (printf "proofline-%s" .class) "" $classes.create) }}
{{- with $class }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Pods begin anew when the settings change. */}}
{{- define "proofline.annotations" -}}
annotations: { proofline/settings: {{ dict "settings" .Values.settings "tls" .Values.courier.tlsSecret | toJson | sha256sum | trunc 16 }} }
{{- end }}

{{/* The environment by which a process of kind .user finds Redis. */}}
{{- define "proofline.redis" -}}
{{- $redis := .root.Values.redis -}}
{{- $url := $redis.url | default "redis://redis:6379/0" -}}
{{- if $redis.users -}}
{{- $url = $url | replace "://" (printf "://%s@" .user) -}}
{{- end -}}
{{- if $redis.caSecret -}}
{{- $url = printf "%s%sssl_ca_certs=/run/redis/ca.pem" $url (ternary "&" "?" (contains "?" $url)) -}}
{{- end -}}
{{- if $redis.sentinelPassword -}}
{{- $url = printf "%s%ssentinel_password_file=/run/proofline/sentinel_password" $url (ternary "&" "?" (contains "?" $url)) -}}
{{- end -}}
- { name: POC_REDIS_URL, value: {{ quote $url }} }
{{- end }}

{{- define "proofline.mounts" -}}
- { name: secrets, mountPath: /run/proofline, readOnly: true }
{{- if .root.Values.redis.caSecret }}
- { name: redis-ca, mountPath: /run/redis, readOnly: true }
{{- end }}
- { name: tmp, mountPath: /tmp }
{{- end }}

{{- define "proofline.volumes" -}}
{{- $key := ternary (printf "%s_redis_password" .user) "redis_password" .root.Values.redis.users -}}
- name: secrets
  secret:
    secretName: {{ .root.Values.secret }}
    items:
      - { key: {{ $key }}, path: redis_password }
      {{- if .root.Values.redis.sentinelPassword }}
      - { key: sentinel_password, path: sentinel_password }
      {{- end }}
      {{- if eq .user "flower" }}
      - { key: flower_password, path: flower_password }
      {{- end }}
{{- with .root.Values.redis.caSecret }}
- name: redis-ca
  secret: { secretName: {{ . }} }
{{- end }}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* All kinds of workers, each with what it does not say itself: {"kinds": [...]} in JSON. */}}
{{- define "proofline.kinds" -}}
{{- $kinds := list -}}
{{- $names := dict -}}
{{- range $index, $own := .Values.workers -}}
{{- $kind := mergeOverwrite (deepCopy $.Values.worker) $own -}}
{{- $where := printf "workers[%d]" $index -}}
{{- if hasKey $names $kind.name -}}
{{- fail (printf "%s.name: %s stands there twice" $where $kind.name) -}}
{{- end -}}
{{- $_ := set $names $kind.name true -}}
{{- $engine := mul $kind.tensorParallel $kind.pipelineParallel | int -}}
{{- if and (gt (int $kind.gpus) 0) (ne (mod $kind.gpus $engine | int) 0) -}}
{{- fail (printf "%s.gpus: %v is no multiple of tensorParallel x pipelineParallel, %d" $where $kind.gpus $engine) -}}
{{- end -}}
{{- if and (eq (int $kind.gpus) 0) (gt $engine 1) -}}
{{- fail (printf "%s.gpus: 0, and tensorParallel x pipelineParallel is %d" $where $engine) -}}
{{- end -}}
{{- if and $kind.autoscale.max (not $.Values.monitoring.prometheus) -}}
{{- fail (printf "%s.autoscale.max: %v, and monitoring.prometheus is empty" $where $kind.autoscale.max) -}}
{{- end -}}
{{- if and $kind.autoscale.max (lt (int $kind.autoscale.max) (int $kind.autoscale.min)) -}}
{{- fail (printf "%s.autoscale.max: %v is below min, %v" $where $kind.autoscale.max $kind.autoscale.min) -}}
{{- end -}}
{{- $kinds = append $kinds $kind -}}
{{- end -}}
{{- dict "kinds" $kinds | toJson -}}
{{- end }}

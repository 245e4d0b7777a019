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
{{- if and $redis.users (regexMatch "://[^/?]*@" $redis.url) -}}
{{- fail "redis.users: true, and redis.url names a user" -}}
{{- end -}}
{{- if and $redis.caSecret (not (hasPrefix "rediss" $redis.url)) -}}
{{- fail (printf "redis.caSecret: %s, and redis.url begins with neither rediss:// nor rediss+sentinel://" $redis.caSecret) -}}
{{- end -}}
{{- if and $redis.sentinelPassword (not (contains "+sentinel://" $redis.url)) -}}
{{- fail "redis.sentinelPassword: true, and redis.url names no Sentinels" -}}
{{- end -}}
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
{{- if gt (int $kind.hosts) 1 -}}
{{- if or (eq (int $kind.gpus) 0) (ne (mul $kind.gpus $kind.hosts | int) $engine) -}}
{{- fail (printf "%s.hosts: %v of %v GPU(s) are not tensorParallel x pipelineParallel, %d" $where $kind.hosts $kind.gpus $engine) -}}
{{- end -}}
{{- else if and (gt (int $kind.gpus) 0) (ne (mod $kind.gpus $engine | int) 0) -}}
{{- fail (printf "%s.gpus: %v is no multiple of tensorParallel x pipelineParallel, %d" $where $kind.gpus $engine) -}}
{{- else if and (eq (int $kind.gpus) 0) (gt $engine 1) -}}
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

{{/* The pods of a kind of workers: .root and .kind, one of proofline.kinds. */}}
{{- define "proofline.worker" -}}
{{- $root := .root -}}
{{- $kind := .kind -}}
{{- $gpus := int $kind.gpus -}}
{{- $hosts := int $kind.hosts -}}
metadata:
  labels: { app: worker, kind: {{ $kind.name }} }
  {{- include "proofline.annotations" $root | nindent 2 }}
spec:
  {{- include "proofline.pod" $root | nindent 2 }}
  {{- include "proofline.place" (dict "root" $root "place" $kind "class" "worker") | nindent 2 }}
  terminationGracePeriodSeconds: 60 # the batch in hand has 30 s, chat under way 20
  containers:
    - name: worker
      image: {{ include "proofline.image" (dict "root" $root "name" (ternary "workerGpu" "workerCpu" (gt $gpus 0))) }}
      # After `--`: arguments of `vllm serve`.
      args:
        - workers
        - --verbose
        {{- with $kind.model }}
        - --model
        - {{ quote . }}
        {{- end }}
        {{- if $gpus }}
        - --gpus
        - all
        - --tensor-parallel
        - {{ $kind.tensorParallel | int | quote }}
        - --pipeline-parallel
        - {{ $kind.pipelineParallel | int | quote }}
        {{- end }}
        {{- if gt $hosts 1 }}
        # LeaderWorkerSet tells each pod its place and its head.
        - --hosts
        - {{ quote $hosts }}
        - --rank
        - $(LWS_WORKER_INDEX)
        - --head
        - $(LWS_LEADER_ADDRESS):7070
        {{- end }}
        {{- range $kind.options }}
        - {{ quote . }}
        {{- end }}
        {{- with $kind.engineArgs }}
        - --
        {{- range . }}
        - {{ quote . }}
        {{- end }}
        {{- end }}
      envFrom: [{ configMapRef: { name: settings } }]
      env:
        {{- include "proofline.redis" (dict "root" $root "user" "worker") | nindent 8 }}
        - name: POC_CHAT_HOST
          value: 0.0.0.0
        - name: POC_CHAT_ADVERTISE_HOST # where the API reaches this worker's chat
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - name: HF_TOKEN
          valueFrom: { secretKeyRef: { name: {{ $root.Values.secret }}, key: hf_token, optional: true } }
        - { name: HOME, value: /cache }
        - { name: HF_HOME, value: /cache/huggingface }
        - { name: VLLM_CACHE_ROOT, value: /cache/vllm }
        - { name: TORCHINDUCTOR_CACHE_DIR, value: /cache/torchinductor }
        - { name: TRITON_CACHE_DIR, value: /cache/triton }
        - { name: FLASHINFER_WORKSPACE_BASE, value: /cache }
        {{- range $name, $value := $kind.env }}
        - { name: {{ $name }}, value: {{ quote $value }} }
        {{- end }}
      {{- $limits := dict }}
      {{- if $gpus }}
      {{- $limits = dict $kind.gpuResource $gpus }}
      {{- end }}
      resources: {{ mergeOverwrite (deepCopy $kind.resources) (dict "limits" $limits) | toJson }}
      # Nothing kills a worker that loads for hours or waits for a deployment: `workers` starts an engine that was lost anew by
      # itself, and ends when it gives up. So it has neither startupProbe nor livenessProbe.
      readinessProbe:
        exec: { command: [sh, -c, 'test -n "$(find ${TMPDIR:-/tmp}/proofline-ready -mmin -1)"'] }
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 4
      {{- include "proofline.container" $root | nindent 6 }}
      volumeMounts:
        {{- include "proofline.mounts" (dict "root" $root) | nindent 8 }}
        - { name: cache, mountPath: /cache }
        {{- if $kind.cache.claim }}
        - { name: models, mountPath: /cache/huggingface }
        {{- end }}
        - { name: shm, mountPath: /dev/shm }
  volumes:
    {{- include "proofline.volumes" (dict "root" $root "user" "worker") | nindent 4 }}
    {{- with $kind.cache.claim }}
    - name: models
      persistentVolumeClaim: { claimName: {{ . }} }
    - name: cache # compiled kernels, made anew by each pod
      emptyDir: {}
    {{- end }}
    - name: shm # ranks of a parallel engine exchange tensors through it
      emptyDir: { medium: Memory, sizeLimit: {{ $kind.sharedMemory }} }
{{- end }}

{{/* The volumes that each of these pods has for itself. */}}
{{- define "proofline.claims" -}}
{{- $cache := .kind.cache -}}
{{- if not $cache.claim -}}
volumeClaimTemplates: # models and compiled kernels, kept for the next start
  - metadata: { name: cache }
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $cache.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources: { requests: { storage: {{ $cache.size }} } }
{{- end -}}
{{- end }}

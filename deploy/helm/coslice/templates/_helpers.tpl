{{- /* Of a service too, so: letters, digits and "-", beginning with a letter. Releases may have dots. */ -}}
{{- define "coslice.name" -}}
{{- $name := regexReplaceAll "^([0-9])" (replace "." "-" .Release.Name) "r${1}" -}}
{{- if not (contains "coslice" $name) }}{{ $name = printf "%s-coslice" $name }}{{ end -}}
{{ regexReplaceAll "-+$" (trunc 30 $name) "" }}
{{- end }}

{{- /* A number as it was written: Helm has those of a file as floats, and prints them as 1e+08. */ -}}
{{- define "coslice.number" -}}
{{ toJson . }}
{{- end }}

{{- define "coslice.labels" -}}
app.kubernetes.io/name: coslice
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Of a part: (list . "agent") */ -}}
{{- define "coslice.selector" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: coslice
app.kubernetes.io/instance: {{ $top.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* Of a part: (list . "agent"). A name that says which one, by digest or by a tag of its own, is taken as it is. */ -}}
{{- define "coslice.image" -}}
{{- with index . 0 -}}
{{- $image := index .Values.image (index $ 1) -}}
{{ $image }}{{ if not (regexMatch "@|:[^/]+$" $image) }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "coslice.peers" -}}
{{ include "coslice.name" . }}-peers.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "coslice.orchestratorCert" -}}
{{- if eq .Values.tls.source "secret" }}{{ .Values.tls.orchestratorSecret }}{{ else }}{{ include "coslice.name" . }}-orchestrator-tls{{ end }}
{{- end }}

{{- /* A node's name where only 63 characters fit: in a label, and within the names of objects. */ -}}
{{- define "coslice.node" -}}
{{- if le (len .) 63 }}{{ . }}{{ else }}{{ regexReplaceAll "[-.]+$" (trunc 52 .) "" }}-{{ sha256sum . | trunc 10 }}{{ end }}
{{- end }}

{{- /* Of one node, or of all (node ""): (list . "node-1") */ -}}
{{- define "coslice.agentName" -}}
{{ include "coslice.name" (index . 0) }}-agent{{ with index . 1 }}-{{ include "coslice.node" . }}{{ end }}
{{- end }}

{{- define "coslice.agentCert" -}}
{{- $tls := (index . 0).Values.tls -}}
{{- if ne $tls.source "secret" }}{{ include "coslice.agentName" . }}-tls
{{- else }}{{ $tls.agentSecret }}{{ with index . 1 }}-{{ . }}{{ end }}{{ end }}
{{- end }}

{{- define "coslice.tokenSecret" -}}
{{ .Values.tokens.secret | default (printf "%s-tokens" (include "coslice.name" .)) }}
{{- end }}

{{- define "coslice.agentsPort" -}}
{{ ternary 50051 50052 .Values.insecure }}
{{- end }}

{{- define "coslice.store" -}}
{{- $store := .Values.orchestrator.store -}}
{{- $prefix := $store.etcd.prefix | default (printf "%s/%s" .Release.Namespace (include "coslice.name" .)) -}}
{{- if eq $store.type "kubernetes" -}}
kubernetes://{{ .Release.Namespace }}/{{ include "coslice.name" . }}
{{- else if eq $store.type "sqlite" -}}
sqlite:/var/lib/coslice/state/orchestrator.db
{{- else if $store.etcd.tlsSecret -}}
etcd+tls://{{ join "," $store.etcd.endpoints }}/{{ $prefix }}?ca=/etc/coslice/etcd/ca.crt&cert=/etc/coslice/etcd/tls.crt&key=/etc/coslice/etcd/tls.key
{{- else -}}
etcd://{{ join "," $store.etcd.endpoints }}/{{ $prefix }}
{{- end -}}
{{- end }}

{{- define "coslice.settings" -}}
{{- range $name, $value := . }}
- {{ printf "--set=%s=%s" $name (ternary $value (include "coslice.number" $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end }}

{{- /* What the schema cannot say, because it concerns two values at once. */ -}}
{{- define "coslice.check" -}}
{{- $o := .Values.orchestrator -}}
{{- if and (eq $o.store.type "sqlite") (gt (int $o.replicas) 1) -}}
{{- fail "orchestrator.store.type=sqlite is one process's own: set orchestrator.replicas to 1, or use the store kubernetes or etcd" -}}
{{- end -}}
{{- if and (eq $o.store.type "etcd") (not $o.store.etcd.endpoints) -}}
{{- fail "orchestrator.store.type=etcd needs orchestrator.store.etcd.endpoints, for example {etcd-0.etcd:2379}" -}}
{{- end -}}
{{- if and (eq $o.store.type "etcd") (not $o.store.etcd.tlsSecret) (not .Values.insecure) -}}
{{- fail "orchestrator.store.type=etcd would be written to in the clear: set orchestrator.store.etcd.tlsSecret, or insecure" -}}
{{- end -}}
{{- if not .Values.insecure -}}
{{- if and (eq .Values.tls.source "secret") (not .Values.tls.orchestratorSecret) -}}
{{- fail "tls.source=secret needs tls.orchestratorSecret (keys tls.crt, tls.key, ca.crt)" -}}
{{- end -}}
{{- if and (eq .Values.tls.source "secret") .Values.agent.enabled (not .Values.tls.agentSecret) -}}
{{- fail "tls.source=secret needs tls.agentSecret (keys ca.pem, and NODE.pem, NODE.key for each node), or agent.enabled=false" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.tls.source "secret") .Values.agent.enabled (not .Values.insecure) -}}
{{- range .Values.tls.nodes -}}
{{- if or (gt (len .) 249) (and $.Values.tls.perNode (gt (add (len $.Values.tls.agentSecret) 1 (len .)) 253)) -}}
{{- fail (printf "tls.source=secret: the node's name %s is too long for a secret (%s-NODE, with the key NODE.pem): use certManager" . $.Values.tls.agentSecret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.perNode -}}
{{- if .Values.insecure -}}
{{- fail "tls.perNode gives each node a certificate of its own, insecure gives none: leave one out" -}}
{{- end -}}
{{- if and .Values.agent.enabled (not .Values.tls.nodes) -}}
{{- fail "tls.perNode needs the names of the nodes in tls.nodes, for example {node-1,node-2}" -}}
{{- end -}}
{{- if .Values.agent.affinity.nodeAffinity -}}
{{- fail "tls.perNode: tls.nodes says where agents run: leave agent.affinity.nodeAffinity out" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.insecure) (not .Values.metrics.serviceMonitor.tokenSecret.name) -}}
{{- fail "metrics ask for a token: put one (coslice token create --role read --secret FILE) into a secret and name it in metrics.serviceMonitor.tokenSecret.name" -}}
{{- end -}}
{{- end }}

{{- /* With "cert" and "key" beside the values: whose CA. Certificates name localhost; Prometheus dials pods by number. */ -}}
{{- define "coslice.endpoint" -}}
{{- $m := .Values.metrics.serviceMonitor }}
- port: http
  path: /metrics
  interval: {{ $m.interval }}
  {{- if not .Values.insecure }}
  scheme: https
  tlsConfig:
    ca: {secret: {name: {{ .cert }}, key: {{ .key }}}}
    serverName: localhost
  authorization:
    credentials: {name: {{ $m.tokenSecret.name }}, key: {{ $m.tokenSecret.key }}}
  {{- end }}
{{- end }}

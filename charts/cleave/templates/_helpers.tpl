{{- define "cleave.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "cleave.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "cleave.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "cleave.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "cleave.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels by which pods are selected: (list . "agent"). */}}
{{- define "cleave.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "cleave.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "cleave.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/*
Image of the MPS host: (list . NAME). The one that the DaemonSet has, unless an upgrade of it is asked for: its pods are replaced only when
they are deleted, so with another image in its template it would never be up to date, which is what `helm upgrade --wait`, Argo CD and Flux wait for.
*/}}
{{- define "cleave.mpsHostImage" -}}
{{- $root := index . 0 -}}
{{- $image := include "cleave.image" $root -}}
{{- $found := lookup "apps/v1" "DaemonSet" $root.Release.Namespace (index . 1) -}}
{{- if and $found (eq (include "cleave.mpsHostUpgrade" $root) "Never") -}}
{{- range $found.spec.template.spec.containers -}}
{{- if eq .name "mps-host" -}}
{{- $image = .image -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ $image }}
{{- end }}

{{/* What an upgrade makes of the MPS hosts: Never, ByHand or WhenIdle. */}}
{{- define "cleave.mpsHostUpgrade" -}}
{{- $upgrade := toString .Values.mpsHost.upgrade -}}
{{- get (dict "false" "Never" "true" "ByHand") $upgrade | default $upgrade -}}
{{- end }}

{{/* Environment of every container. */}}
{{- define "cleave.env" -}}
- name: CLEAVE_LOG_FORMAT
  value: {{ lower .Values.log.format }}
- name: CLEAVE_LOG
  value: {{ .Values.log.level | quote }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{/* Environment of the containers that talk to the driver. */}}
{{- define "cleave.driverEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: CLEAVE_RUN_DIR
  value: {{ .Values.paths.run }}
{{- if .Values.driver.inject }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- end }}
{{- with .Values.driver.nvmlLibrary }}
- name: CLEAVE_NVML_LIBRARY
  value: {{ . }}
{{- end }}
{{- end }}

{{/* Mounts of the containers that talk to the driver. */}}
{{- define "cleave.driverMounts" -}}
# Device nodes come and go with MIG instances: a copy made at the pod's start would not do.
- name: dev
  mountPath: /dev
  mountPropagation: HostToContainer
- name: run
  mountPath: {{ .Values.paths.run }}
  mountPropagation: HostToContainer
{{- with .Values.driver.path }}
- name: driver
  mountPath: {{ . }}
  readOnly: true
  mountPropagation: HostToContainer
{{- end }}
{{- end }}

{{- define "cleave.driverVolumes" -}}
- name: dev
  hostPath: {path: /dev, type: Directory}
- name: run
  hostPath: {path: {{ .Values.paths.run }}, type: DirectoryOrCreate}
{{- with .Values.driver.path }}
# Without a type: a node without a driver gets an empty directory, and its agent says that there is none.
- name: driver
  hostPath: {path: {{ . }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}

{{/*
Tolerations of Cleave's pods: (list . GIVEN). They have to get to a node that it has tainted: it is an agent that says that it is well again. Not
where all is tolerated anyway: a template that changes makes pods of it outdated.
*/}}
{{- define "cleave.tolerations" -}}
{{- $given := index . 1 | default list -}}
{{- $all := false -}}
{{- range $given -}}
{{- if and (eq (toString .operator) "Exists") (not .key) (not .effect) -}}
{{- $all = true -}}
{{- end -}}
{{- end -}}
{{- if and (index . 0).Values.operator.taintUnhealthyNodes (not $all) -}}
{{- $given = append $given (dict "key" "cleave.dev/unhealthy" "operator" "Exists") -}}
{{- end -}}
{{- with $given -}}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

{{/* Where the DaemonSets' pods run. */}}
{{- define "cleave.nodes" -}}
priorityClassName: {{ .Values.nodes.priorityClassName }}
{{- with .Values.nodes.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.nodes.affinity }}
affinity:
  {{- toYaml .Values.nodes.affinity | nindent 2 }}
{{- else if .Values.nodes.labelledOnly }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      # Any of them: the first is of GPU feature discovery, the others of node feature discovery, by its settings.
      nodeSelectorTerms:
        {{- range list "nvidia.com/gpu.present" "feature.node.kubernetes.io/pci-10de.present" "feature.node.kubernetes.io/pci-0302_10de.present" "feature.node.kubernetes.io/pci-0300_10de.present" }}
        - matchExpressions:
            - {key: {{ . }}, operator: In, values: ["true"]}
        {{- end }}
{{- end }}
{{- with include "cleave.tolerations" (list . .Values.nodes.tolerations) }}
{{ . }}
{{- end }}
{{- end }}

{{/*
In CEL, whether a container's limits name what Cleave shares: k is the resource's name. The one place where the admission policies have these
names from; cleave-api's `names` has the same. Literal: a parameter that cannot be had would refuse every pod of the cluster.
*/}}
{{- define "cleave.isShared" -}}
(k.startsWith('nvidia.com/gpu-') || k.startsWith('nvidia.com/mig-') || k == 'nvidia.com/gpu.shared')
{{- end }}

{{/*
In CEL, whether a pod (. is its variable) asks for shares. An extended resource is always in the limits: the API server refuses requests
without. Nothing in it can fail, and it reads only what every pod has: it decides whom a policy that fails concerns.
*/}}
{{- define "cleave.asksForShares" -}}
({{ . }}.spec.containers + {{ . }}.spec.?initContainers.orValue([])).exists(c, c.?resources.?limits.orValue({}).exists(k, {{ include "cleave.isShared" . }} && string(c.resources.limits[k]) != '0'))
{{- end }}

{{/* In CEL, whether a pod (. is its variable) waits at our gate. */}}
{{- define "cleave.isGated" -}}
{{ . }}.spec.?schedulingGates.orValue([]).exists(g, g.name == '{{ include "cleave.gateName" . }}')
{{- end }}

{{/* The gate; cleave-api's `names` has the same. */}}
{{- define "cleave.gateName" -}}
cleave.dev/placement
{{- end }}

{{/* What puts the gate on pods: policy, webhook or none. */}}
{{- define "cleave.gate" -}}
{{- $gate := .Values.admission.gate | default "none" -}}
{{- if not .Values.admission.enabled -}}
none
{{- else if ne $gate "auto" -}}
{{ $gate }}
{{- else if semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version -}}
policy
{{- else -}}
webhook
{{- end -}}
{{- end }}

{{/* Which pods get the gate, as conditions of the policy and of the webhook. */}}
{{- define "cleave.gateConditions" -}}
# Pods come here before they are validated: one without containers is to be refused for that, and not because nothing can be said of it.
- name: has-containers
  expression: object.spec.containers != null
- name: asks-for-shares
  expression: >-
    {{ include "cleave.asksForShares" "object" }}
# The API server asks once more about what it has changed itself: that is gated then, and to mutate it again is what costs most.
- name: is-not-gated
  expression: >-
    !{{ include "cleave.isGated" "object" }}
# The API server refuses a gate on a pod that has its node already: another policy says so in better words. Mirrors of static pods have one.
- name: has-no-node
  expression: object.spec.?nodeName.orValue('') == ''
{{- end }}

{{/*
In CEL, whether k may name shares under MPS, whose programs can break each other; cleave-api's `names` has the same. That a policy makes turns of
what it names so costs a container of those a second at its end.
*/}}
{{- define "cleave.isMps" -}}
((k.startsWith('nvidia.com/gpu-') && k != 'nvidia.com/gpu-timeslice') || (k.startsWith('nvidia.com/mig-') && k.endsWith('.shared')))
{{- end }}

{{/* In CEL, whether container c has shares under MPS, and no hook of its own before its end. */}}
{{- define "cleave.wantsPreStop" -}}
!c.?lifecycle.?preStop.hasValue() && c.?resources.?limits.orValue({}).exists(k, {{ include "cleave.isMps" . }} && string(c.resources.limits[k]) != '0')
{{- end }}

{{/* What makes containers with shares sleep before their end: policy, webhook or none. */}}
{{- define "cleave.preStop" -}}
{{- $gate := include "cleave.gate" . -}}
{{- if or (not .Values.admission.enabled) (eq (int .Values.admission.preStopSeconds) 0) -}}
none
{{- else if ne $gate "none" -}}
{{ $gate }}
{{- else if semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version -}}
policy
{{- else -}}
none
{{- end -}}
{{- end }}

{{/* Which pods that may concern, as conditions of the policy and of the webhook. */}}
{{- define "cleave.preStopConditions" -}}
- name: has-containers
  expression: object.spec.containers != null
- name: a-container-wants-it
  expression: >-
    object.spec.containers.exists(c, {{ include "cleave.wantsPreStop" . }})
    || object.spec.?initContainers.orValue([]).exists(c, c.?restartPolicy.orValue('') == 'Always' && {{ include "cleave.wantsPreStop" . }})
# The API server refuses a sleep that is longer than the grace; one as long would leave nothing of it.
- name: has-the-time
  expression: object.spec.?terminationGracePeriodSeconds.orValue(30) > {{ int .Values.admission.preStopSeconds }}
- name: has-not-declined
  expression: object.metadata.?annotations[?'cleave.dev/pre-stop'].orValue('') != 'none'
{{- end }}

{{/* In CEL, the most of k that can be on one device, as text: contexts of an MPS server, or replicas. Of MIG instances several may be meant. */}}
{{- define "cleave.mostShares" -}}
(k == 'nvidia.com/gpu-mps' || k.matches('^nvidia\\.com/gpu-[0-9]+gb$') ? '48' : k.startsWith('nvidia.com/mig-') && !k.endsWith('.shared') ? '1000000' : '100')
{{- end }}

{{/* In CEL, whether k is an annotation of ours. What a pod declines is its own matter. */}}
{{- define "cleave.isOurs" -}}
(k != 'cleave.dev/pre-stop' && (k.startsWith('cleave.dev/') || k.contains('.cleave.dev/')))
{{- end }}

{{/*
In CEL, whether e is an environment variable that container c must not set. Sidecars without shares may keep GPUs away from themselves, which
images of CUDA programs ask for by default.
*/}}
{{- define "cleave.isOverride" -}}
(e.name.startsWith('CUDA_MPS_') || (e.name == 'NVIDIA_VISIBLE_DEVICES' && (variables.sharing.exists(s, s.name == c.name) || has(e.valueFrom) || !(e.?value.orValue('') in ['', 'void', 'none']))))
{{- end }}

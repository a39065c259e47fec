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

{{/* Labels that select the pods of a component: (list . "agent"). */}}
{{- define "cleave.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "cleave.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The image of all components: by digest if image.digest is set, otherwise by tag. */}}
{{- define "cleave.image" -}}
{{- with (.Values.global).imageRegistry | default .Values.image.registry -}}
{{ trimSuffix "/" . }}/
{{- end -}}
{{ .Values.image.repository }}
{{- with .Values.image.digest -}}
@{{ . }}
{{- else -}}
:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/*
Image of the MPS host: (list . NAME). If mpsHost.upgrade is Never, the existing DaemonSet keeps its
image. Its pods are replaced only when they are deleted, so with a new image in its template the
DaemonSet would never be up to date. Flux and `helm upgrade --wait` of Helm 4 wait for that state.
*/}}
{{- define "cleave.mpsHostImage" -}}
{{- $root := index . 0 -}}
{{- include "cleave.keptImage" (list $root (index . 1) "mps-host" (eq (include "cleave.mpsHostUpgrade" $root) "Never")) -}}
{{- end }}

{{/*
Image of a DaemonSet's container: (list . NAME CONTAINER KEEP). If KEEP is true, an existing DaemonSet
keeps its image.
*/}}
{{- define "cleave.keptImage" -}}
{{- $root := index . 0 -}}
{{- $container := index . 2 -}}
{{- $image := include "cleave.image" $root -}}
{{- $found := lookup "apps/v1" "DaemonSet" $root.Release.Namespace (index . 1) -}}
{{- if and $found (index . 3) -}}
{{- range $found.spec.template.spec.containers -}}
{{- if eq .name $container -}}
{{- $image = .image -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ $image }}
{{- end }}

{{/* When an upgrade replaces MPS hosts: Never, ByHand or WhenIdle. */}}
{{- define "cleave.mpsHostUpgrade" -}}
{{- $upgrade := toString .Values.mpsHost.upgrade -}}
{{- get (dict "false" "Never" "true" "ByHand") $upgrade | default $upgrade -}}
{{- end }}

{{/* Directory in which the agent registers with the kubelet relay. */}}
{{- define "cleave.relayDir" -}}
{{ .Values.paths.run }}/kubelet
{{- end }}

{{/* Environment of the containers of the operator, the agent and the MPS host. */}}
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

{{/* Environment of the containers that use the driver. */}}
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

{{/* Mounts of the containers that use the driver. */}}
{{- define "cleave.driverMounts" -}}
# Mount the host's /dev, because MIG instances add and remove device nodes while the pod runs.
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
# On a node without a driver this directory is empty, and the agent reports that the driver is
# missing.
- name: driver
  hostPath: {path: {{ . }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}

{{/*
Tolerations of Cleave's pods: (list . GIVEN). Cleave's pods must run on nodes that the operator has
tainted, because the agent reports when a node is healthy again. Adds nothing if GIVEN tolerates
everything: a changed template would make all pods outdated.
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

{{/* Priority class and node selection of the three DaemonSets. */}}
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
{{- if not .Values.nodes.gpuLabels }}
{{- fail "nodes.gpuLabels is empty, and nodes.labelledOnly is true. List labels of your GPU nodes, or set nodes.labelledOnly to false" }}
{{- end }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      # A GPU node has at least one of these labels (nodes.gpuLabels).
      nodeSelectorTerms:
        {{- range .Values.nodes.gpuLabels }}
        {{- $label := splitn "=" 2 . }}
        - matchExpressions:
            {{- if contains "=" . }}
            - {key: {{ $label._0 }}, operator: In, values: [{{ $label._1 | quote }}]}
            {{- else }}
            - {key: {{ . }}, operator: Exists}
            {{- end }}
        {{- end }}
{{- end }}
{{- with include "cleave.tolerations" (list . .Values.nodes.tolerations) }}
{{ . }}
{{- end }}
{{- end }}

{{/* Security context of the agent's and the MPS host's containers. */}}
{{- define "cleave.privileged" -}}
privileged: true
readOnlyRootFilesystem: true
runAsUser: 0
{{- with .Values.nodes.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Priority classes of Cleave's pods that clusters may reserve for system pods, as a list in JSON. */}}
{{- define "cleave.systemClasses" -}}
{{- $classes := list -}}
{{- range list .Values.nodes.priorityClassName .Values.operator.priorityClassName -}}
{{- if hasPrefix "system-" (toString .) -}}
{{- $classes = append $classes . -}}
{{- end -}}
{{- end -}}
{{ $classes | uniq | toJson }}
{{- end }}

{{/*
In CEL: whether Cleave shares the resource k. The admission policies about shares use this
definition. Keep it equal to cleave-api's `names`. The names are literals, because a missing
parameter object would refuse every pod of the cluster.
*/}}
{{- define "cleave.isShared" -}}
(k.startsWith('nvidia.com/gpu-') || k.startsWith('nvidia.com/mig-') || k == 'nvidia.com/gpu.shared')
{{- end }}

{{/*
In CEL: whether a pod (. is its variable) requests shares. Limits suffice: the API server refuses
requests of extended resources without equal limits. The expression must not fail, because it limits
which pods a failing policy affects.
*/}}
{{- define "cleave.requestsShares" -}}
({{ . }}.spec.containers + {{ . }}.spec.?initContainers.orValue([])).exists(c, c.?resources.?limits.orValue({}).exists(k, {{ include "cleave.isShared" . }} && string(c.resources.limits[k]) != '0'))
{{- end }}

{{/* In CEL: whether pods wait at the gate for the resource k. Takes the chart's root. */}}
{{- define "cleave.isGatedResource" -}}
{{- $tests := list -}}
{{- range .Values.admission.gatedResources -}}
{{- if hasSuffix "*" . -}}
{{- $tests = append $tests (printf "k.startsWith('%s')" (trimSuffix "*" .)) -}}
{{- else -}}
{{- $tests = append $tests (printf "k == '%s'" .) -}}
{{- end -}}
{{- end -}}
({{ join " || " $tests }})
{{- end }}

{{/*
In CEL: whether a pod requests a resource for which pods wait at the gate: (list ROOT VARIABLE). As in
cleave.requestsShares, limits suffice, and the expression must not fail.
*/}}
{{- define "cleave.requestsGatedResource" -}}
{{- $pod := index . 1 -}}
({{ $pod }}.spec.containers + {{ $pod }}.spec.?initContainers.orValue([])).exists(c, c.?resources.?limits.orValue({}).exists(k, {{ include "cleave.isGatedResource" (index . 0) }} && string(c.resources.limits[k]) != '0'))
{{- end }}

{{/*
In CEL: whether the pod `object` gets a toleration of taints with the key nvidia.com/gpu: it requests
shares, and none of its tolerations has this key or every key. Keep it equal to the operator's
webhook.
*/}}
{{- define "cleave.needsToleration" -}}
{{ include "cleave.requestsShares" "object" }} && !object.spec.?tolerations.orValue([]).exists(t, t.?key.orValue('') == 'nvidia.com/gpu' || (t.?key.orValue('') == '' && t.?operator.orValue('') == 'Exists'))
{{- end }}

{{/* In CEL: whether a pod (. is its variable) has the placement gate. */}}
{{- define "cleave.isGated" -}}
{{ . }}.spec.?schedulingGates.orValue([]).exists(g, g.name == '{{ include "cleave.gateName" . }}')
{{- end }}

{{/* Name of the placement gate. Keep it equal to cleave-api's `names`. */}}
{{- define "cleave.gateName" -}}
cleave.dev/placement
{{- end }}

{{/* Mechanism that adds the gate to pods: policy, webhook or none. */}}
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

{{/* Match conditions of the policy and the webhook that add the gate. */}}
{{- define "cleave.gateConditions" -}}
# Admission runs before validation. Validation refuses a pod without containers with a better
# message.
- name: has-containers
  expression: object.spec.containers != null
- name: requests-gpus
  expression: >-
    {{ include "cleave.requestsGatedResource" (list . "object") }}
# After the gate is added, the API server may evaluate the policy again or call the webhook again. A
# second mutation of the gated pod would be expensive.
- name: is-not-gated
  expression: >-
    !{{ include "cleave.isGated" "object" }}
# The API server refuses gates on pods that have a node. Mirrors of static pods have a node. For
# other pods with a node, another policy returns a better message.
- name: has-no-node
  expression: object.spec.?nodeName.orValue('') == ''
{{- end }}

{{/*
In CEL: whether k can be a resource of MPS shares. Programs with MPS shares can break each other. Keep
it equal to cleave-api's `names`. If a policy uses such a name for time-slicing, containers sleep
unnecessarily.
*/}}
{{- define "cleave.isMps" -}}
((k.startsWith('nvidia.com/gpu-') && k != 'nvidia.com/gpu-timeslice') || (k.startsWith('nvidia.com/mig-') && k.endsWith('.shared')))
{{- end }}

{{/* In CEL: whether container c has MPS shares and no preStop hook. */}}
{{- define "cleave.needsPreStop" -}}
!c.?lifecycle.?preStop.hasValue() && c.?resources.?limits.orValue({}).exists(k, {{ include "cleave.isMps" . }} && string(c.resources.limits[k]) != '0')
{{- end }}

{{/* Mechanism that adds preStop hooks to containers with MPS shares: policy, webhook or none. */}}
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

{{/* Match conditions of the policy and the webhook that add preStop hooks. */}}
{{- define "cleave.preStopConditions" -}}
- name: has-containers
  expression: object.spec.containers != null
- name: a-container-needs-a-hook
  expression: >-
    object.spec.containers.exists(c, {{ include "cleave.needsPreStop" . }})
    || object.spec.?initContainers.orValue([]).exists(c, c.?restartPolicy.orValue('') == 'Always' && {{ include "cleave.needsPreStop" . }})
# The API server refuses a sleep longer than the grace period. A sleep of equal length leaves no
# time for SIGTERM.
- name: grace-period-is-longer
  expression: object.spec.?terminationGracePeriodSeconds.orValue(30) > {{ int .Values.admission.preStopSeconds }}
- name: has-not-opted-out
  expression: object.metadata.?annotations[?'cleave.dev/pre-stop'].orValue('') != 'none'
{{- end }}

{{/*
In CEL: the maximum number of k on one device, as a string: the contexts of an MPS server, or the
replicas. The number for MIG instances is no real limit, because a container may request several.
*/}}
{{- define "cleave.maxShares" -}}
(k == 'nvidia.com/gpu-mps' || k.matches('^nvidia\\.com/gpu-[0-9]+gb$') ? '48' : k.startsWith('nvidia.com/mig-') && !k.endsWith('.shared') ? '1000000' : '100')
{{- end }}

{{/*
In CEL: whether only the operator may write annotation k. Users may write the annotations in the list.
*/}}
{{- define "cleave.isCleaveAnnotation" -}}
(!(k in ['cleave.dev/borrow', 'cleave.dev/gang', 'cleave.dev/gang-size', 'cleave.dev/pre-stop', 'cleave.dev/replica-placement']) && (k.startsWith('cleave.dev/') || k.contains('.cleave.dev/')))
{{- end }}

{{/*
In CEL: whether container c must not set the environment variable e. Sidecars without shares may opt
out of GPUs, which CUDA images request by default.
*/}}
{{- define "cleave.isOverride" -}}
(e.name.startsWith('CUDA_MPS_') || (e.name == 'NVIDIA_VISIBLE_DEVICES' && (variables.sharing.exists(s, s.name == c.name) || has(e.valueFrom) || !(e.?value.orValue('') in ['', 'void', 'none']))))
{{- end }}


{{/*
Variables of an admission policy: the fields of an object's metadata that a request changes. The
argument is a CEL condition on annotation k that exempts the annotation, or "". The API server
writes managedFields, generation and resourceVersion.
*/}}
{{- define "cleave.changedMetadata" -}}
- name: annotationsBefore
  expression: "oldObject.metadata.?annotations.orValue({})"
- name: annotationsAfter
  expression: "object.metadata.?annotations.orValue({})"
- name: metadata
  expression: >-
    ['labels', 'ownerReferences', 'finalizers'].filter(k, dyn(object.metadata)[?k] != dyn(oldObject.metadata)[?k])
    .map(k, 'metadata.' + k)
    + (variables.annotationsAfter.map(k, k) + variables.annotationsBefore.map(k, k).filter(k, !(k in variables.annotationsAfter)))
    .filter(k, {{ with . }}!{{ . }} && {{ end }}variables.annotationsAfter[?k] != variables.annotationsBefore[?k])
    .map(k, 'metadata.annotations[' + k + ']')
{{- end }}

{{/* The binding that makes an admission policy deny requests: (list . NAME). */}}
{{- define "cleave.denies" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ index . 1 }}
  labels:
    {{- include "cleave.labels" (index . 0) | nindent 4 }}
spec:
  policyName: {{ index . 1 }}
  validationActions: [Deny]
{{- end }}

{{/*
Readiness probe of the MPS host: (list . NAME). With mpsHost.upgrade Never it belongs to the image
that the DaemonSet keeps: an older MPS host does not have the command.
*/}}
{{- define "cleave.mpsHostProbe" -}}
{{- $root := index . 0 -}}
{{- $probe := dict "exec" (dict "command" (list "/usr/bin/cleave-mps-host" "ready")) "periodSeconds" 5 "timeoutSeconds" 5 -}}
{{- $found := lookup "apps/v1" "DaemonSet" $root.Release.Namespace (index . 1) -}}
{{- if and $found (eq (include "cleave.mpsHostUpgrade" $root) "Never") -}}
{{- range $found.spec.template.spec.containers -}}
{{- if eq .name "mps-host" -}}
{{- $probe = .readinessProbe -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $probe -}}
readinessProbe:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end }}

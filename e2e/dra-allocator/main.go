// Command dra-allocator runs Kubernetes' own code for Dynamic Resource Allocation: the API server's
// validation of ResourceSlices and DeviceClasses, and the scheduler's allocator. The tests of
// crates/dra start this program, and compare their model of the scheduler with it.
//
// The program reads requests from standard input and writes one answer for each request to standard
// output, both as lines of JSON:
//
//	{"node": "node1", "slices": [ResourceSlice…], "classes": [DeviceClass…]}
//	{"allocate": ResourceClaim}
//	{"free": "name of an allocated claim"}
//
// go.mod selects the cluster tests' default version of Kubernetes, and versions/VERSION/go.mod
// selects another version.
//
// The first kind of request replaces all slices and classes, and frees all claims. The answer to
// the second kind contains the allocation, or none if the claim does not fit on the node. An answer
// with "errors" means that Kubernetes refuses the objects.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/registry/resource/deviceclass"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"
	kjson "sigs.k8s.io/json"
)

// features are the allocator's features in Kubernetes 1.36 and 1.37 without configuration.
var features = structured.Features{
	AdminAccess:            true,
	ConsumableCapacity:     true,
	DeviceBindingAndStatus: true,
	DeviceTaints:           true,
	PartitionableDevices:   true,
	PrioritizedList:        true,
}

func init() {
	// Kubernetes 1.36 does not have this feature.
	if field := reflect.ValueOf(&features).Elem().FieldByName("FractionalCapacityRange"); field.IsValid() {
		field.SetBool(true)
	}
}

// input is one request. Exactly one of Slices, Allocate and Free is set.
type input struct {
	Node     string            `json:"node"`
	Slices   []json.RawMessage `json:"slices"`
	Classes  []json.RawMessage `json:"classes"`
	Allocate json.RawMessage   `json:"allocate"`
	Free     string            `json:"free"`
}

// output is the answer to one request.
type output struct {
	Errors     []string                      `json:"errors,omitempty"`
	Allocation *resourceapi.AllocationResult `json:"allocation,omitempty"`
}

// cluster is the state that the scheduler sees.
type cluster struct {
	node    *v1.Node
	slices  []*resourceapi.ResourceSlice
	classes classes
	claims  map[string]*resourceapi.AllocationResult
	cache   *cel.Cache
}

// classes lists DeviceClasses by name.
type classes map[string]*resourceapi.DeviceClass

func (all classes) List() ([]*resourceapi.DeviceClass, error) {
	var list []*resourceapi.DeviceClass
	for _, class := range all {
		list = append(list, class)
	}
	return list, nil
}

func (all classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, found := all[name]; found {
		return class, nil
	}
	return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
}

func main() {
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve answers requests until the input ends.
func serve(in io.Reader, out io.Writer) error {
	state := &cluster{}
	reader, writer := bufio.NewReader(in), json.NewEncoder(out)
	for {
		line, err := reader.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			return nil
		}
		if err != nil && err != io.EOF {
			return err
		}
		var next input
		if err := json.Unmarshal(line, &next); err != nil {
			return fmt.Errorf("failed to read a request: %w", err)
		}
		if err := writer.Encode(state.answer(next)); err != nil {
			return err
		}
	}
}

func (c *cluster) answer(next input) output {
	switch {
	case next.Allocate != nil:
		allocation, err := c.allocate(next.Allocate)
		if err != nil {
			return output{Errors: []string{err.Error()}}
		}
		return output{Allocation: allocation}
	case next.Free != "":
		if _, found := c.claims[next.Free]; !found {
			return output{Errors: []string{fmt.Sprintf("claim %s is not allocated", next.Free)}}
		}
		delete(c.claims, next.Free)
		return output{}
	default:
		return output{Errors: c.replace(next)}
	}
}

// replace stores new slices and classes, and frees all claims. It returns why the API server would
// refuse or change objects.
func (c *cluster) replace(next input) []string {
	var errs []string
	*c = cluster{
		node:    &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: next.Node}},
		classes: classes{},
		claims:  map[string]*resourceapi.AllocationResult{},
		cache: cel.NewCache(10, cel.Features{
			EnableConsumableCapacity: features.ConsumableCapacity,
			EnableListTypeAttributes: features.ListTypeAttributes,
		}),
	}
	for _, text := range next.Slices {
		slice := &resourceapi.ResourceSlice{}
		if err := create(text, slice, &resource.ResourceSlice{}, resourceslice.Strategy, "resourceslices"); err != nil {
			errs = append(errs, err.Error())
		}
		c.slices = append(c.slices, slice)
	}
	for _, text := range next.Classes {
		class := &resourceapi.DeviceClass{}
		if err := create(text, class, &resource.DeviceClass{}, deviceclass.Strategy, "deviceclasses"); err != nil {
			errs = append(errs, err.Error())
		}
		c.classes[class.Name] = class
	}
	return errs
}

// create decodes an object, and does what the API server does before it stores the object. It
// returns an error if the API server would refuse the object, or drop fields of it.
func create(text []byte, object, internal runtime.Object, strategy rest.RESTCreateStrategy, plural string) error {
	strict, err := kjson.UnmarshalStrict(text, object)
	if err != nil {
		return err
	}
	if len(strict) > 0 {
		return fmt.Errorf("the API does not know all fields: %v", strict)
	}
	accessor, err := meta.Accessor(object)
	if err != nil {
		return err
	}
	sent := object.DeepCopyObject()
	legacyscheme.Scheme.Default(object)
	if err := legacyscheme.Scheme.Convert(object, internal, nil); err != nil {
		return err
	}
	internalMeta, err := meta.Accessor(internal)
	if err != nil {
		return err
	}
	rest.FillObjectMetaSystemFields(internalMeta)
	ctx := request.WithRequestInfo(request.WithNamespace(context.Background(), ""), &request.RequestInfo{
		IsResourceRequest: true,
		Verb:              "create",
		APIGroup:          resourceapi.GroupName,
		APIVersion:        "v1",
		Resource:          plural,
		Name:              accessor.GetName(),
	})
	if err := rest.BeforeCreate(strategy, ctx, internal); err != nil {
		return err
	}
	stored := object.DeepCopyObject()
	if err := legacyscheme.Scheme.Convert(internal, stored, nil); err != nil {
		return err
	}
	if !equality.Semantic.DeepEqual(withoutMeta(sent), withoutMeta(stored)) {
		return fmt.Errorf("the API server would change %s %s: it would drop or default fields", plural, accessor.GetName())
	}
	return nil
}

// withoutMeta returns a copy of the object without the metadata that the API server adds.
func withoutMeta(object runtime.Object) runtime.Object {
	bare := object.DeepCopyObject()
	bare.GetObjectKind().SetGroupVersionKind(resourceapi.SchemeGroupVersion.WithKind("Any"))
	if accessor, err := meta.Accessor(bare); err == nil {
		accessor.SetUID("")
		accessor.SetCreationTimestamp(metav1.Time{})
		accessor.SetGeneration(0)
	}
	return bare
}

// allocate allocates a claim on the node. It returns nil if the claim does not fit.
func (c *cluster) allocate(text []byte) (*resourceapi.AllocationResult, error) {
	claim := &resourceapi.ResourceClaim{}
	strict, err := kjson.UnmarshalStrict(text, claim)
	if err != nil {
		return nil, err
	}
	if len(strict) > 0 {
		return nil, fmt.Errorf("the API does not know all fields: %v", strict)
	}
	if _, found := c.claims[claim.Name]; found || strings.TrimSpace(claim.Name) == "" {
		return nil, fmt.Errorf("claim %q needs a new name", claim.Name)
	}
	legacyscheme.Scheme.Default(claim)
	ctx := context.Background()
	// The scheduler creates an allocator for each pod.
	allocator, err := structured.NewAllocator(ctx, features, c.allocated(), c.classes, c.slices, c.cache)
	if err != nil {
		return nil, err
	}
	results, err := allocator.Allocate(ctx, c.node, []*resourceapi.ResourceClaim{claim})
	if err != nil || len(results) == 0 {
		return nil, err
	}
	c.claims[claim.Name] = &results[0]
	return &results[0], nil
}

// allocated returns the allocated devices as the scheduler collects them from the claims.
func (c *cluster) allocated() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, allocation := range c.claims {
		for _, result := range allocation.Devices.Results {
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			switch {
			case result.AdminAccess != nil && *result.AdminAccess:
			case result.ShareID == nil:
				state.AllocatedDevices.Insert(id)
			default:
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
				if result.ConsumedCapacity != nil {
					state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
				}
			}
		}
	}
	return state
}

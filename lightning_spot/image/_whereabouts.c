/* Says where the elements of thousands of tensors lie, and how, in one walk over them.

   To ask a tensor for its address, shape and strides by Python takes three calls and two new objects. Here it is one
   call of DLPack's exchange table, which torch has from 2.10 on and other libraries have likewise: its structures and
   its order of functions are those of DLPack's versions 1.x ("DLPack: Open In Memory Tensor Structure", C API). */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAJOR 1
#define MOST_DIMENSIONS 64

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *former;
    void *allocator, *managed_from_object, *managed_to_object;
    int (*from_object)(void *object, Tensor *found); /* sets an exception where it returns another number than 0 */
    void *current_stream;
} Exchange;

/* What is said of one tensor: address, number of dimensions, sizes, strides. Returns the length, or -1. */
static Py_ssize_t describe(const Exchange *exchange, PyObject *object, int64_t *target) {
    Tensor found;
    memset(&found, 0, sizeof found);
    if (exchange->from_object(object, &found) != 0)
        return -1;
    if (found.ndim < 0 || found.ndim > MOST_DIMENSIONS) {
        PyErr_SetString(PyExc_ValueError, "a tensor has too many dimensions");
        return -1;
    }
    if (found.ndim && (found.shape == NULL || found.strides == NULL)) { /* until 1.2 they may be left out */
        PyErr_SetString(PyExc_ValueError, "a tensor says no strides");
        return -1;
    }
    target[0] = (int64_t)((uintptr_t)found.data + (uintptr_t)found.byte_offset);
    target[1] = found.ndim;
    if (found.ndim) {
        memcpy(target + 2, found.shape, found.ndim * sizeof *target);
        memcpy(target + 2 + found.ndim, found.strides, found.ndim * sizeof *target);
    }
    return 2 + 2 * found.ndim;
}

static PyObject *whereabouts(PyObject *module, PyObject *arguments) {
    PyObject *capsule, *first, *second, *tensors;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOO!", &capsule, &first, &second, &PyList_Type, &tensors))
        return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL)
        return NULL;
    if (exchange->major != MAJOR)
        return PyErr_Format(PyExc_ValueError, "DLPack has another version here: %u", exchange->major);
    const Py_ssize_t count = PyList_Size(tensors), most = 2 + 2 * MOST_DIMENSIONS;
    Py_ssize_t room = 8 * count + most, length = 0;
    int64_t *rows = PyMem_Malloc(room * sizeof *rows);
    PyObject *said = NULL;
    if (rows == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *tensor = PyList_GetItem(tensors, number); /* borrowed: nothing below runs code that may let it go */
        if ((PyObject *)Py_TYPE(tensor) != first && (PyObject *)Py_TYPE(tensor) != second) {
            PyErr_SetString(PyExc_TypeError, "not all are plain tensors");
            goto end;
        }
        if (room - length < most) {
            int64_t *larger = PyMem_Realloc(rows, 2 * room * sizeof *rows);
            if (larger == NULL) {
                PyErr_NoMemory();
                goto end;
            }
            rows = larger, room *= 2;
        }
        Py_ssize_t added = describe(exchange, tensor, rows + length);
        if (added < 0)
            goto end;
        length += added;
    }
    said = PyBytes_FromStringAndSize((const char *)rows, length * sizeof *rows);
end:
    PyMem_Free(rows);
    return said;
}

static PyMethodDef methods[] = {{"whereabouts", whereabouts, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_whereabouts", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__whereabouts(void) { return PyModuleDef_Init(&definition); }

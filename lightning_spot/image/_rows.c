/* Looks at rows of thousands of objects, one after the other: what Python does in a tenth of a microsecond for each.

   Each function does what the one of its name in rows.py does. What they do not know (a mapping that is no dict) they
   refuse with a TypeError, and it is done there. Objects are compared by what they are, never by what they hold. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdint.h>

/* The length of a list; -1 and an exception, if it is none. */
static Py_ssize_t length_of(PyObject *row) {
    const Py_ssize_t length = PyList_Size(row);
    if (length < 0)
        PyErr_SetString(PyExc_TypeError, "no list");
    return length;
}

/* Whether a list is of that length; else there is an exception. */
static int is_row(PyObject *row, Py_ssize_t length) {
    if (PyList_Size(row) == length)
        return 1;
    PyErr_SetString(PyExc_ValueError, "rows of different lengths");
    return 0;
}

/* Whether what was found in a row is a plain dict: others have an order of their own. Else there is an exception. */
static int is_dict(PyObject *table) {
    if (table != NULL && (PyObject *)Py_TYPE(table) == (PyObject *)&PyDict_Type)
        return 1;
    if (table != NULL) /* else the row has become shorter, and there is one */
        PyErr_SetString(PyExc_TypeError, "not all are plain dicts");
    return 0;
}

static PyObject *identities(PyObject *module, PyObject *row) {
    (void)module;
    const Py_ssize_t length = length_of(row);
    if (length < 0)
        return NULL;
    PyObject *said = PyBytes_FromStringAndSize(NULL, length * sizeof(uintptr_t));
    if (said == NULL)
        return NULL;
    uintptr_t *target = (uintptr_t *)PyBytes_AsString(said);
    for (Py_ssize_t number = 0; number < length; number++)
        target[number] = (uintptr_t)PyList_GetItem(row, number);
    return said;
}

/* The classes of the objects, each once. */
static PyObject *kinds_of(PyObject *module, PyObject *row) {
    (void)module;
    const Py_ssize_t length = length_of(row);
    PyObject *last = NULL, *found = length < 0 ? NULL : PySet_New(NULL);
    for (Py_ssize_t number = 0; found != NULL && number < PyList_Size(row); number++) {
        PyObject *kind = (PyObject *)Py_TYPE(PyList_GetItem(row, number));
        Py_INCREF(kind); /* classes of classes may have code of their own, and that may let go of the object */
        if (kind != last && PySet_Add(found, kind) != 0)
            Py_CLEAR(found);
        last = kind;
        Py_DECREF(kind);
    }
    return found;
}

static PyObject *are_of_kinds(PyObject *module, PyObject *arguments) {
    PyObject *row, *kinds;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &row, &PyList_Type, &kinds))
        return NULL;
    const Py_ssize_t length = PyList_Size(kinds);
    if (PyList_Size(row) != length)
        Py_RETURN_FALSE;
    for (Py_ssize_t number = 0; number < length; number++)
        if ((PyObject *)Py_TYPE(PyList_GetItem(row, number)) != PyList_GetItem(kinds, number))
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

/* Of each object an attribute; of one of the two kinds, or without it, the object itself. */
static PyObject *unwrapped(PyObject *module, PyObject *arguments) {
    PyObject *row, *name, *first, *second;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!UOO", &PyList_Type, &row, &name, &first, &second))
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t number = 0; found != NULL && number < PyList_Size(row); number++) {
        PyObject *object = PyList_GetItem(row, number);
        Py_INCREF(object); /* to ask for an attribute may run any code */
        PyObject *held = NULL;
        if ((PyObject *)Py_TYPE(object) != first && (PyObject *)Py_TYPE(object) != second) {
            held = PyObject_GetAttr(object, name);
            if (held == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
                PyErr_Clear();
        }
        if (held == NULL && !PyErr_Occurred()) {
            Py_INCREF(object);
            held = object;
        }
        if (held == NULL || PyList_Append(found, held) != 0)
            Py_CLEAR(found);
        Py_XDECREF(held);
        Py_DECREF(object);
    }
    return found;
}

/* Whether each object gives what is at its place: as an attribute of a name; called, where that is NULL. */
static PyObject *all_give(PyObject *row, PyObject *name, PyObject *values) {
    const Py_ssize_t length = PyList_Size(values);
    if (!is_row(row, length))
        return NULL;
    for (Py_ssize_t number = 0; number < length; number++) {
        PyObject *object = PyList_GetItem(row, number);
        if (object == NULL)
            return NULL;
        Py_INCREF(object); /* to ask it may run any code, which may also make the rows shorter */
        PyObject *given = name != NULL ? PyObject_GetAttr(object, name) : PyObject_CallNoArgs(object);
        Py_DECREF(object);
        PyObject *expected = given != NULL ? PyList_GetItem(values, number) : NULL;
        Py_XDECREF(given);
        if (expected == NULL)
            return NULL;
        if (given != expected)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *have(PyObject *module, PyObject *arguments) {
    PyObject *row, *name, *values;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!UO!", &PyList_Type, &row, &name, &PyList_Type, &values))
        return NULL;
    return all_give(row, name, values);
}

static PyObject *are_given_by(PyObject *module, PyObject *arguments) {
    PyObject *givers, *row;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &givers, &PyList_Type, &row))
        return NULL;
    return all_give(givers, NULL, row);
}

/* Of each an attribute that is a whole number, 64 bits long. */
static PyObject *numbers(PyObject *module, PyObject *arguments) {
    PyObject *row, *name;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!U", &PyList_Type, &row, &name))
        return NULL;
    const Py_ssize_t length = PyList_Size(row);
    PyObject *said = PyBytes_FromStringAndSize(NULL, length * sizeof(int64_t));
    if (said == NULL)
        return NULL;
    int64_t *target = (int64_t *)PyBytes_AsString(said);
    for (Py_ssize_t number = 0; number < length; number++) {
        PyObject *object = PyList_GetItem(row, number), *value = NULL; /* NULL: the row has become shorter */
        Py_XINCREF(object);
        if (object != NULL && (value = PyObject_GetAttr(object, name)) != NULL)
            target[number] = PyLong_AsLongLong(value);
        Py_XDECREF(value);
        Py_XDECREF(object);
        if (PyErr_Occurred()) {
            Py_DECREF(said);
            return NULL;
        }
    }
    return said;
}

/* What a method of each gives, called without arguments. */
static PyObject *called(PyObject *module, PyObject *arguments) {
    PyObject *row, *name;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!U", &PyList_Type, &row, &name))
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t number = 0; found != NULL && number < PyList_Size(row); number++) {
        PyObject *object = PyList_GetItem(row, number);
        Py_INCREF(object);
        PyObject *given = PyObject_CallMethodObjArgs(object, name, NULL);
        Py_DECREF(object);
        if (given == NULL || PyList_Append(found, given) != 0)
            Py_CLEAR(found);
        Py_XDECREF(given);
    }
    return found;
}

/* Where the objects are that a row of dicts holds: of each its length, and of each entry the key and the value. */
static PyObject *entries(PyObject *module, PyObject *tables) {
    (void)module;
    Py_ssize_t room = 0;
    const Py_ssize_t length = length_of(tables);
    if (length < 0)
        return NULL;
    for (Py_ssize_t number = 0; number < length; number++) {
        PyObject *table = PyList_GetItem(tables, number);
        if (!is_dict(table))
            return NULL;
        room += 1 + 2 * PyDict_Size(table);
    }
    PyObject *said = PyBytes_FromStringAndSize(NULL, room * sizeof(uintptr_t));
    if (said == NULL)
        return NULL;
    uintptr_t *target = (uintptr_t *)PyBytes_AsString(said), *const end = target + room;
    for (Py_ssize_t number = 0; number < length; number++) { /* nothing here runs code that might change one */
        PyObject *table = PyList_GetItem(tables, number), *key, *value;
        Py_ssize_t place = 0;
        if (target < end)
            *target++ = (uintptr_t)PyDict_Size(table);
        while (end - target >= 2 && PyDict_Next(table, &place, &key, &value)) {
            *target++ = (uintptr_t)key;
            *target++ = (uintptr_t)value;
        }
    }
    return said;
}

/* All values of a row of dicts. */
static PyObject *values_in(PyObject *module, PyObject *tables) {
    (void)module;
    const Py_ssize_t length = length_of(tables);
    PyObject *found = length < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t number = 0; found != NULL && number < length; number++) {
        PyObject *table = PyList_GetItem(tables, number), *key, *value;
        Py_ssize_t place = 0;
        if (!is_dict(table))
            Py_CLEAR(found);
        while (found != NULL && PyDict_Next(table, &place, &key, &value))
            if (PyList_Append(found, value) != 0)
                Py_CLEAR(found);
    }
    return found;
}

/* Of each dict the value under a key; None where one has none. */
static PyObject *under(PyObject *module, PyObject *arguments) {
    PyObject *tables, *key;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!U", &PyList_Type, &tables, &key))
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t number = 0; found != NULL && number < PyList_Size(tables); number++) {
        PyObject *table = PyList_GetItem(tables, number), *value = NULL;
        Py_XINCREF(table); /* to compare keys may run any code, which may also take it out of the row */
        if (is_dict(table) && (value = PyDict_GetItemWithError(table, key)) == NULL && !PyErr_Occurred())
            value = Py_None;
        if (value == NULL || PyList_Append(found, value) != 0)
            Py_CLEAR(found);
        Py_XDECREF(table);
    }
    return found;
}

/* Whether a dict is so long and has these values under these keys; -1 and an exception, if that cannot be told. */
static int holds(PyObject *table, PyObject *length, PyObject *names, PyObject *were) {
    const Py_ssize_t count = PyTuple_Size(names), expected = PyLong_AsSsize_t(length);
    if (PyErr_Occurred() || PyTuple_Size(were) != count) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "rows of different lengths");
        return -1;
    }
    if (PyDict_Size(table) != expected)
        return 0;
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *found = PyDict_GetItemWithError(table, PyTuple_GetItem(names, place)); /* borrowed */
        if (found == NULL && PyErr_Occurred())
            return -1;
        if (found != PyTuple_GetItem(were, place))
            return 0;
    }
    return 1;
}

static PyObject *hold(PyObject *module, PyObject *arguments) {
    PyObject *tables, *lengths, *keys, *values;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!", &PyList_Type, &tables, &PyList_Type, &lengths, &PyList_Type, &keys,
                          &PyList_Type, &values))
        return NULL;
    const Py_ssize_t length = PyList_Size(tables);
    if (!is_row(lengths, length) || !is_row(keys, length) || !is_row(values, length))
        return NULL;
    for (Py_ssize_t number = 0; number < length; number++) {
        PyObject *table = PyList_GetItem(tables, number), *names = PyList_GetItem(keys, number),
                 *were = PyList_GetItem(values, number);
        if (names == NULL || !is_dict(table)) /* NULL, or with an exception: a key's comparison has made rows shorter */
            return NULL;
        Py_INCREF(table); /* and it may take these out of their rows */
        Py_INCREF(names);
        Py_XINCREF(were);
        const int found = holds(table, PyList_GetItem(lengths, number), names, were);
        Py_DECREF(table);
        Py_DECREF(names);
        Py_XDECREF(were);
        if (found < 0)
            return NULL;
        if (!found)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"identities", identities, METH_O, NULL},
    {"kinds_of", kinds_of, METH_O, NULL},
    {"are_of_kinds", are_of_kinds, METH_VARARGS, NULL},
    {"unwrapped", unwrapped, METH_VARARGS, NULL},
    {"have", have, METH_VARARGS, NULL},
    {"numbers", numbers, METH_VARARGS, NULL},
    {"called", called, METH_VARARGS, NULL},
    {"are_given_by", are_given_by, METH_VARARGS, NULL},
    {"entries", entries, METH_O, NULL},
    {"values_in", values_in, METH_O, NULL},
    {"under", under, METH_VARARGS, NULL},
    {"hold", hold, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModuleDef_Init(&definition); }
